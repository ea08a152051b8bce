"""Composes what a process of a plan needs from what the plain model needs: states, and the peak of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from grappe.data.order import cut as rows_cut
from grappe.errors import PlanError
from grappe.errors.user_code import naming_user_line
from grappe.foresight.checkpoint import copied
from grappe.foresight.memory import Accumulating, Overlay, Part, States, peak, states
from grappe.foresight.sharding import Sharding, padded, rows_of
from grappe.foresight.sketch import Parameter, Sketch, homes_of
from grappe.launch.rank import ProcessRank
from grappe.launch.world import own_cores
from grappe.parallel.pipeline.cut import cut
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.pipeline.units import pipeline_units
from grappe.parallel.tensor import tensor_styles
from grappe.plan import Plan
from grappe.step.precision import LOWER

UNFORESEEN = ("exact", "compile", "config")
"""Keys under which a process keeps what the model of memory does not know."""

STATES_ONLY = frozenset({"pipeline", "tensor", "offload", "batchnorm"})
"""Keys of plans whose states are known and whose peak is not."""

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


def _needs(sketch: Sketch, plan: Plan, batch: int | None, gpu: bool) -> Needs:
    everyone = [states(parts, sketch.buffers) for parts in _processes(sketch, plan)]
    rows = _rows(sketch, plan, batch or sketch.task.batch_size)
    most = _peak(sketch, plan, rows, copies=1 if gpu else 2)
    evaluation = _evaluation(sketch, plan, batch or sketch.task.batch_size)
    largest = max(everyone, key=lambda one: one.total)
    return Needs(
        states=largest,
        peak=most,
        least=_peak(sketch, plan, rows, copies=1),
        rows=rows,
        evaluation=None if evaluation is None else evaluation + (0 if gpu else _held_by_gloo(sketch, plan)),
        evaluation_least=evaluation,
        checkpoint=None if plan.changed_keys() & UNCOPIED or sketch.has_modes else copied(sketch, plan),
        gpu=gpu,
    )


def _processes(sketch: Sketch, plan: Plan) -> Iterator[list[Part]]:
    """Yields the parts of each process that differs from others: by stage, by place in the shard and tensor axes."""
    for own in _stages(sketch, plan):
        for tensor in _tensor_parts(sketch, plan):
            for rank in sorted({0, plan.shard - 1}):
                yield [
                    _part(dataclasses.replace(one, shape=tensor.get(one.name, one.shape)), one, plan, rank)
                    for one in own
                ]


def _part(split: Parameter, whole: Parameter, plan: Plan, rank: int) -> Part:
    numbers = split.size // split.item
    if plan.shard > 1 and split.shape:
        numbers = numbers // max(1, split.shape[0]) * rows_of(split, plan.shard, rank)
    return Part(parameter=whole, numbers=numbers)


def _stages(sketch: Sketch, plan: Plan) -> list[list[Parameter]]:
    """Returns the parameters of each process of a pipeline."""
    if plan.pipeline == 1:
        return [list(sketch.parameters)]
    parts = cut(sketch.task, sketch.plain, plan.pipeline * stages_each(plan), sketch.example())
    place_of = {unit: number % plan.pipeline for number, units in enumerate(parts) for unit in units}
    # Not Parameter.unit: of a model of transformers a pipeline's units are others than those that are sharded.
    homes = homes_of(pipeline_units(sketch.task, sketch.plain))
    places = {name: place_of[homes[id(one)]] for name, one in sketch.plain.named_parameters()}
    return [[one for one in sketch.parameters if places[one.name] == place] for place in range(plan.pipeline)]


def _tensor_parts(sketch: Sketch, plan: Plan) -> list[dict[str, tuple[int, ...]]]:
    """Returns, for the first and the last process of the tensor axis, the shapes of its parts of split parameters.

    Raises:
        PlanError: neither the task nor its model has a tensor plan, or it has a style that is not known.
    """
    if plan.tensor == 1:
        return [{}]
    styles = tensor_styles(sketch.plain, sketch.task, plan)
    found: list[dict[str, tuple[int, ...]]] = []
    for rank in (0, plan.tensor - 1):
        shapes = {}
        for one in sketch.parameters:
            module, _, name = one.name.rpartition(".")
            style = next((style for pattern, style in styles.items() if fnmatchcase(module, pattern)), None)
            axis = None if style is None else _axis(type(style).__name__, sketch, module, name)
            if axis is not None:
                each = -(-one.shape[axis] // plan.tensor)
                mine = max(0, min(each, one.shape[axis] - rank * each))
                shapes[one.name] = (*one.shape[:axis], mine, *one.shape[axis + 1 :])
        found.append(shapes)
    return found


def _axis(style: str, sketch: Sketch, module: str, name: str) -> int | None:
    """Returns the axis along which a style of torch's splits a parameter; None: every process has it whole."""
    embeds = type(sketch.plain.get_submodule(module)).__name__ == "Embedding"
    if style == "ColwiseParallel":
        return 1 if embeds else 0
    if style == "RowwiseParallel":
        return 0 if embeds else None if name == "bias" else 1
    if style in ("SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"):
        return None
    raise PlanError(f"tensor_plan() has the style {style} for {module}: how it splits is not foreseen")


def _precision(plan: Plan) -> str:
    return plan.precision if plan.precision in LOWER else "fp32"


def _threads(plan: Plan) -> int:
    return plan.threads or own_cores(ProcessRank(size=plan.processes, local_size=plan.processes))


def _has_peak(sketch: Sketch, plan: Plan) -> bool:
    return not (plan.changed_keys() & STATES_ONLY or sketch.task.whole_batch_loss)


def _peak(sketch: Sketch, plan: Plan, rows: int, copies: int) -> int | None:
    """Computes the most bytes in a step, of a process with the longest rows; None: not known."""
    if not _has_peak(sketch, plan):
        return None
    trace = sketch.trace(rows, _precision(plan), plan.recompute, _threads(plan))
    if not trace.complete:
        return None
    parts = _first_parts(sketch, plan)
    passes = [peak(trace, _overlay(sketch, plan, place, copies)) for place in _distinct(plan.microbatches)]
    temporary = sketch.together * max((part.temporary for part in parts), default=0)
    update = int(states(parts, 0).gradients + temporary)
    # The batch before is kept until its loss is read, one step late.
    return _base(sketch, plan, parts) + max(*passes, update) + 2 * plan.microbatches * trace.batch


def _evaluation(sketch: Sketch, plan: Plan, batch: int) -> int | None:
    """Computes the most bytes in an evaluation between two steps; None: not known."""
    if not _has_peak(sketch, plan):
        return None
    ways = plan.data_parallel
    asked = plan.validation_batch or max(2, 2 * -(-batch // (ways * plan.microbatches))) * ways
    rows = max(1, -(-min(asked, sketch.validation_samples) // ways))
    trace = sketch.evaluation(rows, _precision(plan), _threads(plan))
    if not trace.complete:
        return None
    parts = _first_parts(sketch, plan)
    overlay: Overlay = Accumulating([], there=False)
    if plan.shard > 1:
        overlay = Sharding(sketch.parameters, plan.shard, plan.zero, there=False, reduces=False, copies=1)
    buckets = states(parts, 0).gradients if plan.replicate > 1 and plan.shard == 1 else 0
    trained = sketch.trace(_rows(sketch, plan, batch), _precision(plan), plan.recompute, _threads(plan))
    # The step before has its batch until its loss is read.
    batches = plan.microbatches * trained.batch + trace.batch
    return _base(sketch, plan, parts) + buckets + peak(trace, overlay) + batches


def _held_by_gloo(sketch: Sketch, plan: Plan) -> int:
    """Computes the bytes of the last two gathered units, which gloo's threads may hold for a moment longer."""
    units: dict[int, int] = {}
    for one in sketch.parameters if plan.shard > 1 else ():
        units[one.unit] = units.get(one.unit, 0) + padded(one, plan.shard)
    return sum(sorted(units.values())[-2:])


def _rows(sketch: Sketch, plan: Plan, batch: int) -> int:
    """Returns the samples of the largest microbatch."""
    samples = min(batch, sketch.samples)
    # The first slices and pieces are the longest.
    first, last = rows_cut(samples, plan.data_parallel, 0)
    begin, end = rows_cut(last - first, plan.microbatches, 0)
    return max(1, end - begin)


def _first_parts(sketch: Sketch, plan: Plan) -> list[Part]:
    """Returns the parts of the process that has most."""
    if plan.shard == 1:
        return [Part(parameter=one, numbers=one.size // one.item) for one in sketch.parameters]
    return next(iter(_processes(sketch, plan)))


def _base(sketch: Sketch, plan: Plan, parts: Sequence[Part]) -> int:
    """Computes the bytes that stay from one step to the next."""
    kept = states(parts, sketch.buffers)
    held = kept.parameters
    if plan.shard > 1:
        held = sum(
            padded(one, plan.shard) // plan.shard if one.shape else one.size for one in sketch.parameters
        )
    average = kept.gradients if sketch.task.ema is not None else 0  # of as many numbers
    return sketch.buffers + kept.optimizer + held + average


def _distinct(microbatches: int) -> Sequence[tuple[bool, bool]]:
    """Returns the microbatches of a step that differ: is it the first, is it the last?"""
    first = [(True, microbatches == 1)]
    return first + [(False, False)] * (microbatches > 2) + [(False, True)] * (microbatches > 1)


def _overlay(sketch: Sketch, plan: Plan, place: tuple[bool, bool], copies: int) -> Overlay:
    first, last = place
    if plan.shard > 1:
        reduces = last or plan.zero != 1
        return Sharding(
            sketch.parameters,
            plan.shard,
            plan.zero,
            there=not first,
            reduces=reduces,
            copies=copies,
        )
    sizes = [one.size if one.trained else 0 for one in sketch.parameters]
    buckets = sum(sizes) if plan.replicate > 1 else 0
    return Accumulating(sizes, there=not first, buckets=buckets, last=last)
