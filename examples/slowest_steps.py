"""A watcher (callback) that writes down the slowest optimizer steps.

grappe train digits --callback examples/slowest_steps.py:SlowestSteps
"""

import heapq
import json

import grappe


class SlowestSteps(grappe.Watcher):
    """Writes the ten slowest optimizer steps to slowest_steps.json in the run's folder."""

    def started(self, info: grappe.RunInfo) -> None:
        self.file = info.folder / "slowest_steps.json"
        self.steps: list[tuple[float, int]] = []

    def stepped(self, record: grappe.Record) -> None:
        self.steps = heapq.nlargest(10, [*self.steps, (record.seconds, record.step)])

    def ended(self, outcome: grappe.Outcome | None) -> None:
        found = [{"step": step, "seconds": seconds} for seconds, step in self.steps]
        self.file.write_text(json.dumps(found))
