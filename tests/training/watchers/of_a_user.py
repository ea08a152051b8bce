"""A file of a user's own watchers."""

import json
import os

import grappe


class Diary(grappe.Watcher):
    """Writes down every call."""

    def __init__(self) -> None:
        self.lines: list[list] = []

    def started(self, info: grappe.RunInfo) -> None:
        self._folder = info.folder
        self.lines.append(["started", info.task, info.plan, info.rank, info.world_size, info.start, info.last_step])

    def stepped(self, record: grappe.Record) -> None:
        self.lines.append(["stepped", record.step, record.loss])

    def evaluated(self, step: int, scores) -> None:
        self.lines.append(["evaluated", step, scores.samples])

    def saving(self, step: int) -> None:
        self.lines.append(["saving", step])

    def ended(self, outcome: grappe.Outcome | None) -> None:
        self.lines.append(["ended", outcome.status if outcome else None, os.getpid()])
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        with (self._folder / "diary.jsonl").open("a") as file:
            file.write(text)


class Gradients(grappe.Watcher):
    """Writes down the norm of all gradients, and which are there."""

    def started(self, info: grappe.RunInfo) -> None:
        self._file = (info.folder / "gradients.txt").open("w")

    def gradients_ready(self, step: int, parameters) -> None:
        names = [name for name, parameter in parameters if parameter.grad is not None]
        norm = sum(float(parameter.grad.square().sum()) for _, parameter in parameters if parameter.grad is not None)
        self._file.write(f"{step} {norm**0.5} {' '.join(names)}\n")

    def ended(self, outcome: grappe.Outcome | None) -> None:
        self._file.close()


class Failing(grappe.Watcher):
    """Fails at the second step."""

    def stepped(self, record: grappe.Record) -> None:
        if record.step == 2:
            raise KeyError("no such column")


class NeedsMore(grappe.Watcher):
    """Cannot be made without arguments."""

    def __init__(self, project: str) -> None:
        self.project = project
