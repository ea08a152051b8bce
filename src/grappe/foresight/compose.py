"""Composes what a process of a plan needs from what the plain model needs: states, and the peak of a training step."""

from __future__ import annotations

import dataclasses

from grappe.errors import PlanError
from grappe.errors.user_code import naming_user_line
from grappe.foresight import fake_group, pipeline_peaks, step_peaks
from grappe.foresight.checkpoint import copied
from grappe.foresight.library_memory import LibraryMemory, library_memory
from grappe.foresight.memory import UNKNOWN, Peaks, States, states
from grappe.foresight.partition import largest_rows, processes
from grappe.foresight.sharding import GLOO, GLOO_LATE, NCCL, Copies
from grappe.foresight.sketch import Sketch
from grappe.foresight.slices import slices_of
from grappe.plan import Plan

UNFORESEEN = ("exact", "compile", "config")
"""Keys under which a process keeps what the model of memory does not know."""

UNCOPIED = frozenset({"pipeline", "tensor", "offload"})
"""Keys of plans of which it is not known what is copied for a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Memory of the process of a plan that needs most, in bytes."""

    states: States
    peak: int | None
    """Of all that torch allocates on the device in a training step, at most; None: not known for this plan."""
    least: int | None
    """The same where gloo's threads free their copies of gradients at once: on a CPU the peak lies between."""
    rows: int
    """Samples of its largest microbatch."""
    evaluation: int | None = None
    """The peak of an evaluation, without what the task's metrics keep; None: not known for this plan."""
    evaluation_least: int | None = None
    """The same where gloo's threads free at once what they gathered parameters into."""
    checkpoint: int | None = None
    """Bytes of the copies that checkpoints are written from, in host memory, kept from the first one on; None: not
    known."""
    gpu: bool = False
    """Whether the plan trains on GPUs."""
    libraries: LibraryMemory | None = None
    """Memory that libraries keep, on a CPU; None: not measured."""

    @property
    def most(self) -> int | None:
        """Computes the most bytes on the device, checkpoints' copies not counted; None: not known for this plan."""
        if self.peak is None or self.evaluation is None:
            return None
        return max(self.peak, self.evaluation)

    @property
    def with_copies(self) -> int | None:
        """Computes the most bytes on the device of a training that saves; None: not known for this plan."""
        copies = 0 if self.gpu else self.checkpoint
        return None if self.most is None or copies is None else self.most + copies


def refuse_unforeseen(plan: Plan) -> None:
    """Raises PlanError for a plan whose memory is not known."""
    if plan.engine != "native":
        raise PlanError(
            f"engine={plan.engine}: only plans of engine=native are foreseen; grappe measure runs any plan"
        )
    for key in UNFORESEEN:
        if key in plan.changed_keys():
            raise PlanError(f"{key}: what it keeps in memory is not foreseen; grappe measure runs any plan")


def needs(sketch: Sketch, plan: Plan, *, batch: int | None = None, gpu: bool = False) -> Needs:
    """Computes what a training under `plan` needs.

    Args:
        batch: samples per step over all processes; None: the task's.
        gpu: whether the plan trains on GPUs, whose communication needs no copies of gradients.

    Raises:
        PlanError: the plan's memory is not known, or the task does not support the plan.
        TaskError: the task's own code fails.
    """
    refuse_unforeseen(plan)
    with naming_user_line(sketch.task):
        return _needs(sketch, plan, batch, gpu)


def with_libraries(found: Needs, sketch: Sketch, plan: Plan, *, batch: int | None = None) -> Needs:
    """Returns the needs of `plan`, whose peak is known, with what libraries keep on this machine: kernels are run."""
    kept = library_memory(sketch, plan, batch or sketch.task.batch_size)
    return dataclasses.replace(found, libraries=kept)


def _needs(sketch: Sketch, plan: Plan, batch: int | None, gpu: bool) -> Needs:
    everyone = [states(parts, sketch.buffers) for parts in processes(sketch, plan)]
    samples = batch or sketch.task.batch_size
    most, least = (_peaks(sketch, plan, samples, one) for one in ((NCCL, NCCL) if gpu else (GLOO_LATE, GLOO)))
    return Needs(
        states=max(everyone, key=lambda one: one.total),
        peak=most.step,
        least=least.step,
        rows=largest_rows(sketch, plan, samples),
        evaluation=most.evaluation,
        evaluation_least=least.evaluation,
        checkpoint=None if plan.changed_keys() & UNCOPIED or sketch.has_modes else copied(sketch, plan),
        gpu=gpu,
    )


def _peaks(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> Peaks:
    others = plan.tensor > 1 or slices_of(sketch.task, plan, samples, sketch.samples).ways > 1
    if others and not fake_group.possible():
        return UNKNOWN
    if plan.offload != "none" and copies is NCCL:  # which of it a GPU holds, and when, was never measured
        return UNKNOWN
    if plan.pipeline > 1:
        return pipeline_peaks.peaks(sketch, plan, samples, copies)
    return step_peaks.peaks(sketch, plan, samples, copies)
