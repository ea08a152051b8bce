"""Partition: splits a model's parameters over the processes of a plan: by stage, by the shard and the tensor axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from grappe.data.loader import evaluated_at_once
from grappe.data.sampling import cut as rows_cut
from grappe.errors import PlanError
from grappe.foresight.fake_model import FakeModel, slices_of
from grappe.foresight.memory import Parameter, ParameterShard, homes_of, padded, rows_of, states
from grappe.foresight.trace import Trace, tensors_of
from grappe.launch.rank import ProcessRank
from grappe.launch.world import own_cores
from grappe.parallel.pipeline.cut import Cut, cut_into_stages, pipeline_units
from grappe.parallel.pipeline.rules import stages_each
from grappe.plan import Plan
from grappe.step.precision import LOWER

SCALARS = 1024
"""Bytes of a step's sums, counts and flags."""
RANDOM_STATE = 5056
"""Bytes of torch's random state on a CPU, which activation checkpointing keeps for each unit until it runs again."""
REPEATED = ("selective", "full")
"""Levels of recomputation under which a unit runs again."""


def processes(fake_model: FakeModel, plan: Plan) -> Iterator[list[ParameterShard]]:
    """Yields the parts of each process that differs from others: by stage, by place in the shard and tensor axes."""
    for own in stage_parameters(fake_model, plan):
        for tensor in tensor_parts(fake_model, plan):
            for rank in sorted({0, plan.shard - 1}):
                parts = []
                for parameter in own:
                    split = dataclasses.replace(parameter, shape=tensor.get(parameter.name, parameter.shape))
                    rows = (rows_of(split, plan.shard, rank),) if split.shape else ()
                    parts.append(ParameterShard(parameter=parameter, shape=(*rows, *split.shape[1:])))
                yield parts


def first_processes(fake_model: FakeModel, plan: Plan) -> list[list[ParameterShard]]:
    """Returns the parts of each process of a pipeline that is the first of its shard and tensor axes."""
    parts = list(processes(fake_model, plan))
    return parts[:: len(parts) // plan.pipeline]


def kept(
    fake_model: FakeModel,
    plan: Plan,
    parts: Sequence[ParameterShard],
    own: Sequence[Parameter],
    buffers: int | None = None,
) -> int:
    """Computes the bytes that stay from one step to the next.

    Args:
        own: the process's parameters, before they are sharded.
        buffers: bytes of its buffers; None: of all.
    """
    held = states(parts, fake_model.buffers if buffers is None else buffers)
    parameters = held.parameters
    if plan.uses_fsdp:
        parameters = sum(
            padded(parameter, plan.shard) // plan.shard if parameter.shape else parameter.size for parameter in own
        )
    average = held.gradients if fake_model.task.ema is not None else 0  # of as many numbers
    # Of two samples, kept from the start.
    example = sum(tensor.nbytes for tensor in tensors_of(fake_model.batches.example))
    return held.buffers + held.optimizer + parameters + average + example + SCALARS


def largest_rows(fake_model: FakeModel, plan: Plan, batch: int) -> int:
    """Returns the samples of the largest microbatch."""
    slices = _lengths(min(batch, fake_model.samples), plan.data_parallel)
    return max(1, *(piece for rows in slices for piece in _lengths(rows, plan.microbatches)))


def _lengths(rows: int, parts: int) -> set[int]:
    """Returns the different lengths of the parts into which `rows` rows are cut."""
    bounds = (rows_cut(rows, parts, number) for number in range(parts))
    return {last - first for first, last in bounds}


def evaluated_rows(fake_model: FakeModel, plan: Plan, batch: int) -> int:
    """Returns the samples of an evaluation's largest batch on one process."""
    ways = plan.data_parallel
    # A loss of the whole batch is evaluated in the training's batches.
    asked = batch if fake_model.task.whole_batch_loss else evaluated_at_once(plan, batch)
    return max(1, -(-min(asked, fake_model.validation_samples) // ways))


def precision_of(plan: Plan) -> str:
    """Returns the precision of a forward."""
    return plan.precision if plan.precision in LOWER else "fp32"


def threads_of(plan: Plan) -> int:
    """Returns the threads of a process on this machine."""
    return plan.threads or own_cores(ProcessRank(size=plan.processes, local_size=plan.processes))


def stage_parameters(fake_model: FakeModel, plan: Plan) -> list[list[Parameter]]:
    """Returns the parameters of each process of a pipeline, with the units of the pipeline."""
    if plan.pipeline == 1:
        return [list(fake_model.parameters)]
    parts = cut_of(fake_model, plan)
    place_of = {unit: number % plan.pipeline for number, units in enumerate(parts) for unit in units}
    # Not Parameter.unit: of a model of transformers a pipeline's units are others than those that are sharded.
    homes = homes_of(pipeline_units(fake_model.task, fake_model.plain))
    units = {name: homes[id(parameter)] for name, parameter in fake_model.plain.named_parameters()}
    stages: list[list[Parameter]] = [[] for _ in range(plan.pipeline)]
    for parameter in fake_model.parameters:
        unit = units[parameter.name]
        stages[place_of[unit]].append(dataclasses.replace(parameter, unit=unit))
    return stages


def stage_buffers(fake_model: FakeModel, plan: Plan) -> list[int]:
    """Returns the bytes of the buffers of each process of a pipeline."""
    units, sizes = pipeline_units(fake_model.task, fake_model.plain), [0] * plan.pipeline
    for number, part in enumerate(cut_of(fake_model, plan)):
        own = {id(buffer): buffer.nbytes for unit in part for buffer in units[unit].buffers()}
        sizes[number % plan.pipeline] += sum(own.values())
    return sizes


def cut_of(fake_model: FakeModel, plan: Plan) -> Cut:
    """Returns the units of each stage of a pipeline, as in a training.

    Raises:
        PlanError: the units are not the model, or cannot be cut.
    """
    fake_model.check_units()
    return cut_into_stages(
        fake_model.task, fake_model.plain, plan.pipeline * stages_each(plan), fake_model.batches.example
    )


def traced_passes(fake_model: FakeModel, plan: Plan, samples: int) -> tuple[Trace, ...]:
    """Traces a step of each process of a pipeline, with the largest of its microbatches."""
    return fake_model.passes(
        traced_plan(plan),
        cut_of(fake_model, plan),
        largest_rows(fake_model, plan, samples),
        threads_of(plan),
        slices_of(fake_model.task, plan, samples, fake_model.samples),
    )


def traced_plan(plan: Plan) -> Plan:
    """Returns the plan whose passes are traced for this one's: replicas do not change them."""
    # Traces depend on whether there are shards, not on how many.
    return dataclasses.replace(plan, replicate=1, shard=min(2, plan.shard), threads=None, batchnorm="local")


def tensor_parts(fake_model: FakeModel, plan: Plan) -> list[dict[str, tuple[int, ...]]]:
    """Returns, for the first and the last process of the tensor axis, the shapes of its parts of split parameters.

    Raises:
        PlanError: neither the task nor its model has a tensor plan, or it has a style that is not known.
    """
    if plan.tensor == 1:
        return [{}]
    from grappe.parallel.tensor import tensor_styles

    styles = tensor_styles(fake_model.plain, fake_model.task, plan)
    parts: list[dict[str, tuple[int, ...]]] = []
    for rank in (0, plan.tensor - 1):
        shapes = {}
        for parameter in fake_model.parameters:
            module, _, name = parameter.name.rpartition(".")
            style = next((style for pattern, style in styles.items() if fnmatchcase(module, pattern)), None)
            axis = None if style is None else _axis(type(style).__name__, fake_model, module, name)
            if axis is not None:
                each = -(-parameter.shape[axis] // plan.tensor)
                length = max(0, min(each, parameter.shape[axis] - rank * each))
                shapes[parameter.name] = (*parameter.shape[:axis], length, *parameter.shape[axis + 1 :])
        parts.append(shapes)
    return parts


def _axis(style: str, fake_model: FakeModel, module: str, name: str) -> int | None:
    """Returns the axis along which a style of torch's splits a parameter; None: every process has it whole."""
    embeds = type(fake_model.plain.get_submodule(module)).__name__ == "Embedding"
    if style == "SplitOutputs":
        return 0
    if style == "ColwiseParallel":
        return 1 if embeds else 0
    if style == "RowwiseParallel":
        return 0 if embeds else None if name == "bias" else 1
    if style in ("SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"):
        return None
    raise PlanError(f"tensor_plan() has the style {style} for {module}: how it splits is not foreseen")
