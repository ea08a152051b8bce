"""Runs the references and trials that a verdict needs, each reference only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from grappe.plan import Plan
from grappe.verbs.verify.compare import Difference, compare
from grappe.verbs.verify.hand_batches import RecordedBatch
from grappe.verbs.verify.instrument import Instrumentation
from grappe.verbs.verify.trained_by_hand import Reference, ReferenceRequest
from grappe.verbs.verify.trained_by_plan import TrialRequest, TrialStep

StartProcesses = Callable[[str, Any, Plan], Any]
"""Runs a function ("package.module:name") with an argument on a plan's processes; what process 0 returned."""


class TrialRunner:
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
            dataclasses.replace(instrumentation, loaded_samples=()),
            bool(instrumentation.loaded_samples),
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
            self._note(f"one plain process{_switched_off(instrumentation)}")
            self._references[key] = self._trained(request)
        return self._references[key]

    def _trained(self, request: ReferenceRequest) -> Reference:
        # The launcher starts a plain process: precision is applied inside.
        reference = self._run(
            "grappe.verbs.verify.trained_by_hand:worker", request, Plan(device=request.plan.device)
        )
        self._requests[request.folder] = request
        return reference

    def compare(
        self, reference: Reference, steps: Sequence[TrialStep], without: Collection[str] = ()
    ) -> Difference:
        """Compares a trial with a reference; where weights alone differ, measures closer what rounding may do."""
        difference = compare(reference, steps, without=without)
        if not difference.in_weights_only:
            return difference
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
        self._note(f"{str(plan) or 'one process'}{_switched_off(instrumentation)}")
        return self._run("grappe.verbs.verify.trained_by_plan:worker", request, plan)

    def samples(self, plan: Plan, instrumentation: Instrumentation) -> tuple[Any, ...]:
        """Returns a trial's samples, each loaded once."""
        request = ReferenceRequest(
            task=self.task,
            data=self.data,
            steps=self.steps,
            folder=self._folder,
            instrumentation=instrumentation,
        )
        return self._run("grappe.verbs.verify.trained_by_hand:load", request, Plan(device=plan.device))


SWITCH_NAMES = {
    "without_randomness": "random draws",
    "evaluated_modules": "statistics of the batch",
    "companions": "the batch's company",
    "loss_row_by_row": "losses of several rows",
    "without_augmentation": "augmentation",
    "constant_buffers": "what buffers remember",
    "in_float32": "reduced precision",
    "without_clipping": "clipping",
    "batch_multiple": "uneven slices",
    "loaded_samples": "loading",
}


def _switched_off(instrumentation: Instrumentation) -> str:
    off = [
        SWITCH_NAMES[field.name]
        for field in dataclasses.fields(instrumentation)
        if getattr(instrumentation, field.name)
    ]
    return f", with {' and '.join(off)} switched off" if off else ""
