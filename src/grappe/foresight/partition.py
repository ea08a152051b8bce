"""Partition: splits a model's parameters over the processes of a plan: by stage, by the shard and the tensor axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from grappe.data.order import cut as rows_cut
from grappe.errors import PlanError
from grappe.foresight.memory import Part, states
from grappe.foresight.parameters import Parameter, homes_of
from grappe.foresight.sharding import padded, rows_of
from grappe.foresight.sketch import Sketch
from grappe.foresight.slices import slices_of
from grappe.foresight.trace import Trace, tensors_of
from grappe.launch.rank import ProcessRank
from grappe.launch.world import own_cores
from grappe.parallel.pipeline.cut import Cut, cut
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.pipeline.units import pipeline_units
from grappe.parallel.shard import uses_shard
from grappe.parallel.tensor import tensor_styles
from grappe.plan import Plan
from grappe.step.precision import LOWER

SCALARS = 1024
"""Bytes of a step's sums, counts and flags."""
RANDOM_STATE = 5056
"""Bytes of torch's random state on a CPU, which activation checkpointing keeps for each unit until it runs again."""


def processes(sketch: Sketch, plan: Plan) -> Iterator[list[Part]]:
    """Yields the parts of each process that differs from others: by stage, by place in the shard and tensor axes."""
    for own in stage_parameters(sketch, plan):
        for tensor in tensor_parts(sketch, plan):
            for rank in sorted({0, plan.shard - 1}):
                yield [
                    _part(dataclasses.replace(one, shape=tensor.get(one.name, one.shape)), one, plan, rank)
                    for one in own
                ]


def first_parameters(sketch: Sketch, plan: Plan) -> list[Parameter]:
    """Returns the parameters as the first process of the tensor axis has them, before they are sharded."""
    shapes = tensor_parts(sketch, plan)[0]
    return [dataclasses.replace(one, shape=shapes.get(one.name, one.shape)) for one in sketch.parameters]


def kept(
    sketch: Sketch, plan: Plan, parts: Sequence[Part], own: Sequence[Parameter], buffers: int | None = None
) -> int:
    """Computes the bytes that stay from one step to the next.

    Args:
        own: the process's parameters, before they are sharded.
        buffers: bytes of its buffers; None: of all.
    """
    held = states(parts, sketch.buffers if buffers is None else buffers)
    parameters = held.parameters
    if uses_shard(plan):
        parameters = sum(padded(one, plan.shard) // plan.shard if one.shape else one.size for one in own)
    average = held.gradients if sketch.task.ema is not None else 0  # of as many numbers
    example = sum(one.nbytes for one in tensors_of(sketch.example()))  # of two samples, kept from the start
    return held.buffers + held.optimizer + parameters + average + example + SCALARS


def random_states(sketch: Sketch, plan: Plan) -> int:
    """Computes the bytes of the random states that activation checkpointing keeps."""
    return RANDOM_STATE * (len(sketch.task.units(sketch.plain)) or 1) * plan.recompute


def largest_rows(sketch: Sketch, plan: Plan, batch: int) -> int:
    """Returns the samples of the largest microbatch."""
    slices = _lengths(min(batch, sketch.samples), plan.data_parallel)
    return max(1, *(piece for one in slices for piece in _lengths(one, plan.microbatches)))


def _lengths(rows: int, parts: int) -> set[int]:
    """Returns the different lengths of the parts into which so many rows are cut."""
    bounds = (rows_cut(rows, parts, number) for number in range(parts))
    return {last - first for first, last in bounds}


def evaluated_rows(sketch: Sketch, plan: Plan, batch: int) -> int:
    """Returns the samples of an evaluation's largest batch on one process."""
    ways = plan.data_parallel
    asked = plan.validation_batch or max(2, 2 * -(-batch // (ways * plan.microbatches))) * ways
    if sketch.task.whole_batch_loss:  # in the training's batches
        asked = batch
    return max(1, -(-min(asked, sketch.validation_samples) // ways))


def precision_of(plan: Plan) -> str:
    """Returns the precision of a forward."""
    return plan.precision if plan.precision in LOWER else "fp32"


def threads_of(plan: Plan) -> int:
    """Returns the threads of a process on this machine."""
    return plan.threads or own_cores(ProcessRank(size=plan.processes, local_size=plan.processes))


def _part(split: Parameter, whole: Parameter, plan: Plan, rank: int) -> Part:
    numbers = split.size // split.item
    if plan.shard > 1 and split.shape:
        numbers = numbers // max(1, split.shape[0]) * rows_of(split, plan.shard, rank)
    return Part(parameter=whole, numbers=numbers)


def stage_parameters(sketch: Sketch, plan: Plan) -> list[list[Parameter]]:
    """Returns the parameters of each process of a pipeline, with the units of the pipeline."""
    if plan.pipeline == 1:
        return [list(sketch.parameters)]
    parts = cut_of(sketch, plan)
    place_of = {unit: number % plan.pipeline for number, units in enumerate(parts) for unit in units}
    # Not Parameter.unit: of a model of transformers a pipeline's units are others than those that are sharded.
    homes = homes_of(pipeline_units(sketch.task, sketch.plain))
    places = {name: place_of[homes[id(one)]] for name, one in sketch.plain.named_parameters()}
    units = {name: homes[id(one)] for name, one in sketch.plain.named_parameters()}
    return [
        [
            dataclasses.replace(one, unit=units[one.name])
            for one in sketch.parameters
            if places[one.name] == place
        ]
        for place in range(plan.pipeline)
    ]


def updated_parts(sketch: Sketch, plan: Plan) -> list[tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]:
    """Returns name, shape and type of the first part of each trained parameter, for each process of a pipeline."""
    split = tensor_parts(sketch, plan)[0]

    def shape(one: Parameter) -> tuple[int, ...]:
        if plan.shard == 1 or not one.shape:
            return split.get(one.name, one.shape)
        return (rows_of(one, plan.shard, 0), *one.shape[1:])

    def kind(one: Parameter) -> torch.dtype:
        return {2: torch.bfloat16, 8: torch.float64}.get(one.item, torch.float32)

    return [
        tuple((one.name, shape(one), kind(one)) for one in own if one.trained)
        for own in stage_parameters(sketch, plan)
    ]


def stage_buffers(sketch: Sketch, plan: Plan) -> list[int]:
    """Returns the bytes of the buffers of each process of a pipeline."""
    units, found = pipeline_units(sketch.task, sketch.plain), [0] * plan.pipeline
    for number, part in enumerate(cut_of(sketch, plan)):
        own = {id(one): one.nbytes for unit in part for one in units[unit].buffers()}
        found[number % plan.pipeline] += sum(own.values())
    return found


def cut_of(sketch: Sketch, plan: Plan) -> Cut:
    """Returns the units of each stage of a pipeline, as in a training.

    Raises:
        PlanError: the units are not the model, or cannot be cut.
    """
    sketch.check_units()
    return cut(sketch.task, sketch.plain, plan.pipeline * stages_each(plan), sketch.example())


def traced_passes(sketch: Sketch, plan: Plan, samples: int) -> tuple[Trace, ...]:
    """Traces a step of each process of a pipeline, with the largest of its microbatches."""
    return sketch.passes(
        traced_plan(plan),
        cut_of(sketch, plan),
        largest_rows(sketch, plan, samples),
        threads_of(plan),
        slices_of(sketch.task, plan, samples, sketch.samples),
    )


def traced_plan(plan: Plan) -> Plan:
    """Returns the plan whose passes are traced for this one's: replicas do not change them."""
    # Traces depend on whether there are shards, not on how many.
    return dataclasses.replace(plan, replicate=1, shard=min(2, plan.shard), threads=None, batchnorm="local")


def tensor_parts(sketch: Sketch, plan: Plan) -> list[dict[str, tuple[int, ...]]]:
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


def split_modules(sketch: Sketch, plan: Plan) -> int:
    """Counts the modules that the plan splits over the tensor axis."""
    return len({name.rpartition(".")[0] for name in tensor_parts(sketch, plan)[0]})


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
