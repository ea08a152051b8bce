"""Schedules of pipelines: each process's passes in their order, and a simulation of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from grappe.parallel.pipeline.rules import stages_each
from grappe.plan import Plan

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
