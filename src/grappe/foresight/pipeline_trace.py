"""Simulates a pipeline's step: each process's passes in order, traced on fake tensors with what schedules keep."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grappe.data.batch import Batch, entering, stored_in
from grappe.foresight import trace
from grappe.parallel.pipeline.cut import Cut
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.pipeline.stage import Stage
from grappe.plan import Plan
from grappe.private_api.torch import split_backward, tree_flatten, tree_unflatten
from grappe.step.loss import Losses
from grappe.step.precision import autocast
from grappe.task import Task

Kind = Literal["forward", "backward", "inputs", "weights"]
"""Kind of a pass; zero_bubble splits the backward: first the inputs' gradients, then the weights'."""
Pass = tuple[Kind, int, int]
"""Kind, stage, microbatch."""


def orders_of(plan: Plan) -> list[list[Pass]]:
    """Returns each process's passes."""
    return [order_of(plan, place) for place in range(plan.pipeline)]


def order_of(plan: Plan, place: int) -> list[Pass]:
    """Returns the passes of the process at `place`, as torch.distributed.pipelining orders them.

    interleaved: Narayanan et al. (2021, section 2.2), "Efficient large-scale … training on GPU clusters".
    zero_bubble: Qi et al. (2023, section 2.2), "Zero Bubble Pipeline Parallelism", ZB-H1.
    """
    processes, micros, each = plan.pipeline, plan.microbatches, stages_each(plan)
    order: list[Pass] = []
    if plan.schedule == "gpipe":
        kinds: tuple[Kind, ...] = ("forward", "backward")
        return [(kind, place, micro) for kind in kinds for micro in range(micros)]
    if plan.schedule == "1f1b":
        warm = min(micros, processes - place)
        order.extend(("forward", place, micro) for micro in range(warm))
        for micro in range(micros):
            order.append(("backward", place, micro))
            if warm + micro < micros:
                order.append(("forward", place, warm + micro))
        return order
    # Microbatches go through a process's stages in rounds of one for each process.
    group, total = micros // max(1, micros // processes), micros * each

    def numbered(kind: Kind, number: int) -> Pass:
        chunk = number // group % each
        chunk = chunk if kind == "forward" else each - 1 - chunk
        return kind, chunk * processes + place, number // (group * each) * group + number % group

    splits = plan.schedule == "zero_bubble"
    warm = min(total, (each - 1) * group + (1 if splits else 2) * (processes - 1 - place))
    order += [numbered("forward", number) for number in range(warm)]
    for number in range(total):
        if warm + number < total:
            order.append(numbered("forward", warm + number))
        order.append(numbered("inputs" if splits else "backward", number))
        if splits and number >= place:
            order.append(numbered("weights", number - place))
    return order + [numbered("weights", number) for number in range(max(0, total - place), total) if splits]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One step of a pipeline."""

    seconds: float
    """From the first forward to the last backward."""
    busy: tuple[float, ...]
    """Seconds in which each process computes."""

    @property
    def bubble(self) -> float:
        """Computes the seconds in which the busiest process waits."""
        return self.seconds - max(self.busy)


def simulate(
    orders: Sequence[Sequence[Pass]], seconds: Callable[[Kind, int], float], transfer: Callable[[int], float]
) -> SimulatedStep:
    """Runs each process's passes in its order, each as soon as its inputs have arrived.

    Args:
        orders: of each process.
        seconds: of a stage's pass of each kind.
        transfer: seconds from the end of a pass until a neighbour on another process has the result, by the stage
            before the boundary between the two: stage 0 hands outputs over it, and receives their gradients.
    """
    stages = 1 + max(stage for order in orders for _, stage, _ in order)
    done: dict[Pass, float] = {}
    owner = {stage: place for place, order in enumerate(orders) for _, stage, _ in order}
    now, next_of = [0.0] * len(orders), [0] * len(orders)
    while any(next_of[place] < len(order) for place, order in enumerate(orders)):
        moved = False
        for place, order in enumerate(orders):
            while next_of[place] < len(order):
                kind, stage, micro = order[next_of[place]]
                needed = _needed_by(order[next_of[place]], stages)
                if any(before not in done for before in needed):
                    break
                arrivals = [
                    done[before] + (transfer(min(before[1], stage)) if owner[before[1]] != place else 0.0)
                    for before in needed
                ]
                now[place] = max(now[place], *arrivals, 0.0) + seconds(kind, stage)
                done[kind, stage, micro] = now[place]
                next_of[place] += 1
                moved = True
        assert moved, "the order cannot be run"
    busy = tuple(sum(seconds(kind, stage) for kind, stage, _ in order) for order in orders)
    return SimulatedStep(seconds=max(now), busy=busy)


def _needed_by(step: Pass, stages: int) -> list[Pass]:
    """Returns the passes whose results a pass needs."""
    kind, stage, micro = step
    if kind == "forward":
        return [("forward", stage - 1, micro)] if stage else []
    if kind == "weights":
        return [("inputs", stage, micro)]
    return [("forward", stage, micro), *([(kind, stage + 1, micro)] if stage + 1 < stages else [])]


Leaves = tuple[Tensor, ...]


def stages_of(task: Task, units: Sequence[nn.Module], parts: Cut, precision: str) -> list[Stage]:
    """Makes all stages of a pipeline of a model's units."""
    return [
        Stage([units[unit] for unit in part], number, len(parts), autocast(precision, trace.CPU), task.forward)
        for number, part in enumerate(parts)
    ]


class Boundaries:
    """Tensors that enter each stage, without values: each stage is run once, without gradients."""

    def __init__(self, stages: Sequence[Stage], batch: Batch) -> None:
        micro = batch.microbatches[0]
        leaves, stages[0].entering = tree_flatten(micro.inputs)
        self.entering: list[Leaves] = [tuple(leaves)]
        with torch.no_grad():
            for stage, after in zip(stages, [*stages[1:], None], strict=True):
                entering(micro)
                leaves = stage(*leaves)
                self.entering.append(tuple(leaves))
                if after is not None:
                    after.entering = stage.leaving

    def received(self, stage: int) -> Leaves:
        """Makes the tensors into which a stage receives its inputs."""
        return tuple(_like(leaf, leaf.is_floating_point()) for leaf in self.entering[stage])

    def handed(self, stage: int) -> Leaves:
        """Returns what a stage hands to the next one; of the last stage nothing."""
        return self.entering[stage + 1] if stage + 1 < len(self.entering) else ()

    def gradients(self, stage: int) -> tuple[Tensor | None, ...]:
        """Makes the tensors into which a stage receives the gradients of its outputs."""
        return tuple(_like(leaf) if leaf.is_floating_point() else None for leaf in self.entering[stage + 1])


class _Process:
    """One process of a pipeline, and what it keeps during a step; its methods are the kinds of passes."""

    def __init__(self, task: Task, own: Mapping[int, Stage], bounds: Boundaries, batch: Batch, plan: Plan) -> None:
        self._batch, self._losses, self._precision = batch, Losses(task, summed_in=stored_in(plan)), plan.precision
        micros = plan.microbatches
        self._inputs = {(number, micro): bounds.received(number) for number in own if number for micro in range(micros)}
        self._gradients = {
            (number, micro): bounds.gradients(number)
            for number, stage in own.items()
            if not stage.is_last
            for micro in range(micros)
        }
        self._cached: dict[tuple[int, int], tuple[Leaves, Leaves]] = {}
        self._roots: dict[int, Tensor] = {}
        self._halves: dict[tuple[int, int], tuple[Leaves, Sequence[Any], list[dict[str, Any]]]] = {}

    def forward(self, stage: Stage, micro: int) -> Leaves:
        """Runs a forward, and on the last stage the loss; returns what goes to the next stage."""
        key, micro_batch = (stage.number, micro), self._batch.microbatches[0]
        inputs = self._inputs.get(key) or tuple(tree_flatten(micro_batch.inputs)[0])
        entering(micro_batch)
        outputs = stage(*inputs)
        self._cached[key] = outputs, inputs
        if stage.is_last:
            assert stage.leaving is not None
            with autocast(self._precision, trace.CPU):
                loss = self._losses(tree_unflatten(list(outputs), stage.leaving), micro_batch, self._batch)
            self._roots[micro] = loss.scalar()
            return ()
        return outputs

    def backward(self, stage: Stage, micro: int) -> Leaves:
        """Runs a backward; returns the gradients of the inputs."""
        key = stage.number, micro
        outputs, inputs = self._cached.pop(key)
        if stage.is_last:
            torch.autograd.backward(self._roots.pop(micro))
        else:
            pairs = zip(outputs, self._gradients[key], strict=True)
            with_gradients = [(output, gradient) for output, gradient in pairs if output.requires_grad]
            torch.autograd.backward(
                [output for output, _ in with_gradients], [gradient for _, gradient in with_gradients]
            )
        gradients = tuple(leaf.grad for leaf in inputs if isinstance(leaf, Tensor) and leaf.grad is not None)
        for leaf in trace.tensors_of(inputs):
            leaf.grad = None
        return gradients

    def inputs(self, stage: Stage, micro: int) -> Leaves:
        """Runs the input-gradient half of a backward; the first stage leaves all to the other half.

        These gradients stay on the inputs until the next step.
        """
        if stage.is_first:
            return ()
        key = stage.number, micro
        outputs, inputs = self._cached.pop(key)
        ends: Leaves = (self._roots.pop(micro),) if stage.is_last else outputs
        received = None if stage.is_last else list(self._gradients[key])
        gradients, groups = split_backward().stage_backward_input(list(ends), received, inputs, stage.parameters())
        self._halves[key] = ends, inputs, groups
        return tuple(gradient for gradient in gradients if gradient is not None)

    def weights(self, stage: Stage, micro: int) -> Leaves:
        """Runs the weight-gradient half."""
        if stage.is_first:
            self.backward(stage, micro)
            return ()
        _, _, groups = self._halves.pop((stage.number, micro))
        split_backward().stage_backward_weight(stage.parameters(), groups)
        return ()


def traced_step(
    task: Task,
    stages: Sequence[Stage],
    bounds: Boundaries,
    batch: Batch,
    plan: Plan,
    place: int,
    *,
    describes: bool,
    records: bool,
) -> trace.Trace:
    """Runs a step of the process at `place`, and follows the bytes in use; inside the mode of fake tensors.

    With zero=2 and 3 gradients are taken away as soon as they are there.
    """
    own = {stage.number: stage for stage in stages if stage.number % plan.pipeline == place}
    parameters = [parameter for stage in own.values() for parameter in stage.parameters()]
    ledger = _ledger(own.values(), batch, describes, records)
    _mark_units(stages, own, ledger)
    if plan.uses_fsdp and plan.zero != 1:
        trace.take_gradients(enumerate(parameters), ledger)
    # 1F1B awaits each send before the next one, the others await all at the step's end.
    most = 1 if plan.schedule == "1f1b" else None
    sent: deque[Any] = deque(maxlen=most)  # gradients of inputs
    handed: deque[Any] = deque(maxlen=most)  # outputs
    with ledger:
        process = _Process(task, own, bounds, batch, plan)
        order, late = order_of(plan, place), None
        begins = next(index for index, (kind, _, _) in enumerate(order) if kind != "forward")
        for index, (kind, number, which) in enumerate(order):
            ledger.mark(trace.START, number)
            (handed if kind == "forward" else sent).append(getattr(process, kind)(own[number], which))
            if kind == "forward" and index == begins - 2:
                # Tensors that 1F1B sends before its last warm-up are freed with the cool-down's first send.
                late = handed[-1]
            ledger.mark(trace.LEFT if kind == "forward" else trace.END)
        sent.clear()
        handed.clear()
        del late
        ledger.mark(trace.REDUCE)  # gradients, and what was received into, which stays
    for parameter in parameters:
        parameter.grad = None
    handed_on = _bytes(bounds.handed(number) for number in own)
    return trace.made(ledger, batch.microbatches[0], boundaries=handed_on)


def _mark_units(stages: Sequence[Stage], own: Mapping[int, Stage], ledger: trace.Ledger) -> None:
    """Marks the units of a process's stages, numbered over the whole model."""
    numbers = {id(unit): number for number, unit in enumerate(unit for stage in stages for unit in stage.units)}
    for stage in own.values():
        for unit in stage.units:
            trace.watch(unit, numbers[id(unit)], ledger)


def traced_evaluation(
    task: Task, stages: Sequence[Stage], number: int, bounds: Boundaries, batch: Batch, *, describes: bool
) -> trace.Trace:
    """Runs a stage on validation samples, without gradients; inside the mode of fake tensors."""
    stage = stages[number]
    micro, losses = batch.microbatches[0], Losses(task)
    ledger = _ledger([stage], batch, describes)
    _mark_units(stages, {stage.number: stage}, ledger)
    numbers = 0
    with ledger, torch.no_grad():
        ledger.mark(trace.START, stage.number)
        leaves = bounds.entering[0] if stage.is_first else bounds.received(stage.number)
        entering(micro)
        outputs = stage(*leaves)
        ledger.mark(trace.LEFT)
        if stage.is_last:
            assert stage.leaving is not None
            numbers = trace.scored(losses, tree_unflatten(list(outputs), stage.leaving), micro, batch)
        ledger.mark(trace.SCORED)
    return trace.made(ledger, micro, boundaries=_bytes([outputs]), numbers=numbers)


def _ledger(stages: Iterable[Stage], batch: Batch, describes: bool, records: bool = False) -> trace.Ledger:
    existing = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
    existing += trace.tensors_of(batch.microbatches[0])
    return trace.Ledger(existing, describes=describes, records=records)


def _bytes(several: Iterable[Leaves]) -> tuple[int, ...]:
    return tuple(sum(leaf.nbytes for leaf in leaves) for leaves in several)


def _like(leaf: Tensor, requires_grad: bool = False) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=trace.CPU, requires_grad=requires_grad)
