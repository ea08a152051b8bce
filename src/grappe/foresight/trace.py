"""Trace: a microbatch's forward and backward on fake tensors, or its evaluation, with marks of what is in use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grappe.data.batch import Batch, Microbatch
from grappe.data.rand_like import entering
from grappe.foresight.kernels import Call, Kernels, describe
from grappe.foresight.ledger import Ledger, Mark, Operator
from grappe.launch.world import World
from grappe.parallel.batchnorm import buffers_kept
from grappe.plan import Plan
from grappe.private_api.torch import tree_leaves
from grappe.step.fast_paths import backward
from grappe.step.loss import Loss
from grappe.step.precision import autocast
from grappe.step.whole_batch_loss import AnyLosses, WholeBatchLosses, make_losses
from grappe.task import Task

CPU = torch.device("cpu")
START, FORWARD, LEFT, LOSS, BACKWARD, DONE, GRADIENT, END, SCORED, REDUCE = (
    "start", "forward", "left", "loss", "backward", "done", "gradient", "end", "scored", "reduce",
)  # fmt: skip
"""Kinds of marks: of a unit its forward's beginning and end, its backward's beginning and end; of a parameter its
gradient; of the whole model the beginning, its forward's end, the loss and the end; SCORED: an evaluation's end;
REDUCE: where a pipeline's process reduces the gradients of all its passes."""
ROOT = -1
TOTAL_AND_COUNT = 2
"""Numbers that an evaluation keeps of a microbatch whose losses have no names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A microbatch's forward and backward on one process, whose gradients are taken away as soon as they are there."""

    rows: int
    marks: tuple[Mark, ...]
    batch: int
    """Bytes of its inputs, targets and weights."""
    boundaries: tuple[int, ...] = ()
    """Of a pipeline: bytes that each of its stages hands to the next one."""
    calls: tuple[tuple[int, int, Call], ...] = ()
    """Operators whose kernels are of libraries, each with the number of the next mark and the bytes in use."""
    complete: bool = True
    """Whether what all kernels take is counted."""
    operators: tuple[Operator, ...] = ()
    """All operators, if they are recorded."""
    ahead: int = 0
    """So many marks, the first ones, are of the pass ahead that a loss of the whole batch needs."""
    numbers: int = 0
    """Numbers that an evaluation keeps of each microbatch."""


def traced(
    task: Task,
    model: nn.Module,
    units: Sequence[nn.Module],
    batch: Batch,
    precision: str,
    plan: Plan,
    world: World,
    *,
    describes: bool,
    records: bool = False,
    trains: bool = True,
) -> Trace:
    """Runs `model` on `batch` and follows the bytes in use; inside the mode of fake tensors.

    Args:
        units: the model's, whose beginnings and ends are marked.
        plan: what the task's loss is computed under, in `world`.
        describes: whether to keep the calls of operators whose kernels are of libraries.
        records: whether to record all operators.
        trains: whether to run backward; else gradients must be off.
    """
    micro = batch.microbatches[0]
    given = tensors_of(micro)
    known = [*model.parameters(), *model.buffers(), *tensors_of(batch.microbatches)]
    ledger = Ledger(known, describe if describes else None, records=records)
    for number, unit in enumerate(units):
        watch(unit, number, ledger)
    take_gradients(enumerate(model.parameters()), ledger)
    losses = make_losses(task, plan, world)
    numbers = 0
    with ledger:
        if trains and isinstance(losses, WholeBatchLosses) and losses.look_ahead_needed(batch):
            with autocast(precision, CPU):
                _first_pass(task, model, losses, batch, ledger)
        ahead = len(ledger.marks)
        ledger.mark(START)
        with autocast(precision, CPU):
            compute: Callable[..., Loss | int] = losses if trains else functools.partial(scored, losses)
            found = compute(_left(ledger, task.forward(model, entering(micro))), micro, batch)
        if isinstance(found, Loss):
            ledger.mark(LOSS)
            backward((found.values,), (found.output_gradient,))
            del found, losses, compute
            ledger.mark(END)
        else:
            numbers = found
            ledger.mark(SCORED)
    return Trace(
        rows=micro.size,
        marks=ordered(ledger.marks),
        batch=sum(one.nbytes for one in given),
        calls=tuple(ledger.calls),
        operators=tuple(ledger.operators),
        ahead=ahead,
        numbers=numbers,
    )


@torch.no_grad()
def _first_pass(task: Task, model: nn.Module, losses: WholeBatchLosses, batch: Batch, ledger: Ledger) -> None:
    """Runs forward of all microbatches, whose outputs a loss of the whole batch needs first."""
    outputs = []
    with buffers_kept(model):
        for micro in batch.microbatches:
            ledger.mark(START)
            outputs.append(_left(ledger, task.forward(model, entering(micro))))
        losses.look_ahead(batch, outputs, 1.0)
    outputs.clear()
    ledger.mark(SCORED)


def with_kernels(trace: Trace, kernels: Kernels, threads: int) -> Trace:
    """Returns the trace with what its kernels take besides their output, in a process of so many threads."""
    calls = [one for one in trace.calls if one[2].with_scratch]
    sizes = kernels.sizes((call for _, _, call in calls), threads)
    marks = list(trace.marks)
    for place, level, call in calls:
        mark = marks[place]
        marks[place] = mark._replace(peak=max(mark.peak, level + sizes.get(call, 0)))
    complete = all(call in sizes for _, _, call in calls)
    return dataclasses.replace(trace, marks=tuple(marks), complete=complete)


def scored(losses: AnyLosses, output: Any, micro: Microbatch, batch: Batch) -> int:
    """Computes what an evaluation computes of a microbatch's output; returns how many numbers it keeps."""
    if isinstance(losses, WholeBatchLosses):
        losses.scored(output, micro, batch)
        return TOTAL_AND_COUNT
    values, named = losses.values(output, micro)
    losses.total(values, micro)
    counts = len(micro.weights) if isinstance(micro.weights, Mapping) else 0
    return TOTAL_AND_COUNT + len(named) + counts


def watch(unit: nn.Module, number: int, ledger: Ledger) -> None:
    """Marks where a unit's forward and backward begin and end."""

    def enters(_: Any, inputs: Any, keywords: Any = None) -> None:
        ledger.mark(FORWARD, number)
        for leaf in tensors_of((inputs, keywords)):
            if leaf.requires_grad:
                leaf.register_hook(lambda gradient: ledger.mark(DONE, number))

    def leaves(_: Any, inputs: Any, output: Any) -> None:
        for leaf in tensors_of(output):
            if leaf.requires_grad:
                leaf.register_hook(lambda gradient: ledger.mark(BACKWARD, number))
        ledger.mark(LEFT, number)

    unit.register_forward_pre_hook(enters, with_kwargs=True)
    unit.register_forward_hook(leaves)


def ordered(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Orders marks of one moment: a unit's backward has ended before that of the unit before it begins.

    Both are hooks of the tensor between the two, which run in the order of the forward.
    """
    found: list[Mark] = []
    for mark in marks:
        before = found[-1] if found else mark
        if mark.kind == DONE and before.kind == BACKWARD and mark.peak == mark.level == before.level:
            found[-1:] = [mark._replace(peak=before.peak), before._replace(peak=before.level)]
        else:
            found.append(mark)
    return tuple(found)


def _left(ledger: Ledger, output: Any) -> Any:
    ledger.mark(LEFT)
    return output


def take_gradients(numbered: Iterable[tuple[int, Tensor]], ledger: Ledger) -> None:
    """Hooks each parameter: marks when its gradient is ready, and frees it."""
    for number, parameter in numbered:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(_take_gradient, ledger, number))


def _take_gradient(ledger: Ledger, number: int, parameter: Tensor) -> None:
    parameter.grad = None
    ledger.mark(GRADIENT, number)


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors of a nested value."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
