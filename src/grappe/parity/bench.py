"""Bench: runs references and trials for a judgement, each reference once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grappe.parity import plain, trial
from grappe.parity.changes import Changes
from grappe.parity.plain import Reference
from grappe.parity.plain_batches import Given
from grappe.parity.trial import Step
from grappe.plan import Plan

Runner = Callable[[str, Any, Plan], Any]
"""Runs a function ("package.module:name") with an argument on a plan's processes; what process 0 returned."""


class Bench:
    """Where trainings of a few steps are made.

    Args:
        task: a TaskReference.
        folder: an empty one, for weights.
        note: told what is about to be run, in a few words.
    """

    def __init__(
        self, *, task: Any, data: Path, steps: int, folder: Path, run: Runner, note: Callable[[str], None]
    ) -> None:
        self.task, self.data, self.steps = task, data, steps
        self._folder, self._run, self._note = folder, run, note
        self._references: dict[Any, Reference] = {}

    def reference(
        self,
        plan: Plan,
        changes: Changes,
        *,
        ways: int = 1,
        pieces: int = 1,
        precision: bool = False,
        given: tuple[Given, ...] = (),
    ) -> Reference:
        """One plain process on the plan's kind of device.

        Args:
            ways, pieces: the slices and microbatches that it takes one after the other.
            precision: whether in the plan's precision, rather than in fp32.
            given: samples to learn from, rather than those of the order.
        """
        here = Plan(
            device=plan.device,
            threads=plan.threads,
            precision=plan.precision if precision else "fp32",
            exact=pieces if plan.exact and pieces > 1 else 0,
        )
        # The loaded samples are no key, but which they are is settled by the rest.
        key = (
            str(here),
            dataclasses.replace(changes, samples=()),
            bool(changes.samples),
            ways,
            pieces,
            given,
        )
        if key not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            folder.mkdir()
            asked = plain.Asked(
                task=self.task, data=self.data, steps=self.steps, folder=folder, changes=changes, plan=here,
                ways=ways, pieces=pieces, given=given,
            )  # fmt: skip
            self._note(f"one plain process{_words(changes)}")
            # Its precision is its own business; for the launcher it is a process as any.
            self._references[key] = self._run("grappe.parity.plain:worker", asked, Plan(device=plan.device))
        return self._references[key]

    def trial(self, plan: Plan, changes: Changes, against: Reference) -> tuple[Step, ...]:
        """The plan's steps, compared with a reference's."""
        asked = trial.Asked(
            task=self.task, plan=plan, data=self.data, steps=self.steps, against=against.folder,
            changes=changes, draws=bool(against.draws),
        )  # fmt: skip
        self._note(f"{plan or 'one process'}{_words(changes)}")
        return self._run("grappe.parity.trial:worker", asked, plan)

    def samples(self, plan: Plan, changes: Changes) -> tuple[Any, ...]:
        """A trial's samples, each loaded once."""
        asked = plain.Asked(
            task=self.task, data=self.data, steps=self.steps, folder=self._folder, changes=changes
        )
        return self._run("grappe.parity.plain:load", asked, Plan(device=plan.device))


SAID = {
    "draws": "random draws", "mixing": "statistics of the batch", "company": "the batch's company",
    "loss": "losses of several rows", "augment": "augmentation", "buffers": "what buffers remember",
    "precision": "reduced precision", "clip": "clipping", "even": "uneven slices", "samples": "loading",
}  # fmt: skip


def _words(changes: Changes) -> str:
    off = [SAID[field.name] for field in dataclasses.fields(changes) if getattr(changes, field.name)]
    return f", with {' and '.join(off)} switched off" if off else ""
