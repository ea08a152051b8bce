"""Runner: runs references and trials for a judgement, each reference only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from grappe.plan import Plan
from grappe.verbs.verify.compare import Difference, compare
from grappe.verbs.verify.instrument import Instrumentation
from grappe.verbs.verify.reference import Reference, ReferenceRequest
from grappe.verbs.verify.reference_batches import RecordedBatch
from grappe.verbs.verify.trial import TrialRequest, TrialStep

StartProcesses = Callable[[str, Any, Plan], Any]
"""Runs a function ("package.module:name") with an argument on a plan's processes; what process 0 returned."""


class Runner:
    """Runs trainings of a few steps of one task, references and trials.

    Args:
        task: a TaskReference.
        folder: an empty folder, for weights.
        note: callback, called with a short description of the next training.
    """

    def __init__(
        self,
        *,
        task: Any,
        data: Path,
        steps: int,
        folder: Path,
        run: StartProcesses,
        note: Callable[[str], None],
    ) -> None:
        self.task, self.data, self.steps = task, data, steps
        self._folder, self._run, self._note = folder, run, note
        self._references: dict[Any, Reference] = {}
        self._requests: dict[Path, ReferenceRequest] = {}
        self._closer: dict[Path, Reference] = {}

    def reference(
        self,
        plan: Plan,
        instrumentation: Instrumentation,
        *,
        slices: int = 1,
        pieces: int = 1,
        precision: bool = False,
        recorded: tuple[RecordedBatch, ...] = (),
    ) -> Reference:
        """Runs one plain process on the plan's kind of device, once for the same arguments.

        Args:
            slices, pieces: the number of data slices and microbatches, run one after the other.
            precision: whether to train in the plan's precision instead of fp32.
            recorded: batches that replace those of the sample order.
        """
        plain = Plan(
            device=plan.device,
            threads=plan.threads,
            precision=plan.precision if precision else "fp32",
            channels_last=plan.channels_last,  # measured as rounding: the plain process itself has torch's layout
            exact=pieces if plan.exact and pieces > 1 else 0,
        )
        # The loaded samples are no key, but which they are is settled by the rest.
        key = (
            str(plain),
            dataclasses.replace(instrumentation, samples=()),
            bool(instrumentation.samples),
            slices,
            pieces,
            recorded,
        )
        if key not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            folder.mkdir()
            request = ReferenceRequest(
                task=self.task, data=self.data, steps=self.steps, folder=folder,
                instrumentation=instrumentation, plan=plain, slices=slices, pieces=pieces, recorded=recorded,
            )  # fmt: skip
            self._note(f"one plain process{_words(instrumentation)}")
            self._references[key] = self._trained(request)
        return self._references[key]

    def _trained(self, request: ReferenceRequest) -> Reference:
        # The launcher starts a plain process: precision is applied inside.
        found = self._run("grappe.verbs.verify.reference:worker", request, Plan(device=request.plan.device))
        self._requests[request.folder] = request
        return found

    def compare(
        self, reference: Reference, steps: Sequence[TrialStep], without: Collection[str] = ()
    ) -> Difference:
        """Compares a trial with a reference; where weights alone differ, measures closer what rounding may do."""
        found = compare(reference, steps, without=without)
        if not found.in_weights_only:
            return found
        if reference.folder not in self._closer:
            folder = self._folder / f"{reference.folder.name}-perturbed"
            folder.mkdir()
            self._note("one plain process, with parameters moved by their last bit")
            request = dataclasses.replace(self._requests[reference.folder], folder=folder, perturbed=True)
            self._closer[reference.folder] = self._trained(request)
        return compare(reference, steps, tolerance=self._closer[reference.folder], without=without)

    def trial(
        self, plan: Plan, instrumentation: Instrumentation, reference: Reference
    ) -> tuple[TrialStep, ...]:
        """Runs the plan's steps and compares them with a reference's."""
        request = TrialRequest(
            task=self.task, plan=plan, data=self.data, steps=self.steps, reference=reference.folder,
            instrumentation=instrumentation, draws=bool(reference.draws),
        )  # fmt: skip
        self._note(f"{str(plan) or 'one process'}{_words(instrumentation)}")
        return self._run("grappe.verbs.verify.trial:worker", request, plan)

    def samples(self, plan: Plan, instrumentation: Instrumentation) -> tuple[Any, ...]:
        """Returns a trial's samples, each loaded once."""
        request = ReferenceRequest(
            task=self.task,
            data=self.data,
            steps=self.steps,
            folder=self._folder,
            instrumentation=instrumentation,
        )
        return self._run("grappe.verbs.verify.reference:load", request, Plan(device=plan.device))


WORDS = {
    "draws": "random draws", "coupled": "statistics of the batch", "companions": "the batch's company",
    "loss": "losses of several rows", "augment": "augmentation", "buffers": "what buffers remember",
    "precision": "reduced precision", "clip": "clipping", "even": "uneven slices", "samples": "loading",
}  # fmt: skip


def _words(instrumentation: Instrumentation) -> str:
    off = [
        WORDS[field.name]
        for field in dataclasses.fields(instrumentation)
        if getattr(instrumentation, field.name)
    ]
    return f", with {' and '.join(off)} switched off" if off else ""
