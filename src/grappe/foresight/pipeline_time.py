"""Pipeline: simulates a pipeline's schedule, one event for each pass of a microbatch through a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from grappe.foresight.passes import Kind, Pass, order_of
from grappe.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
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
    orders: Sequence[Sequence[Pass]],
    seconds: Callable[[Kind, int], float],
    transfer: Callable[[int], float],
) -> Simulated:
    """Runs each process's passes in its order, each as soon as what it needs has arrived.

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
                needs = _needs(order[next_of[place]], stages)
                if any(one not in done for one in needs):
                    break
                arrived = max(
                    (
                        done[one] + (transfer(min(one[1], stage)) if owner[one[1]] != place else 0.0)
                        for one in needs
                    ),
                    default=0.0,
                )
                now[place] = max(now[place], arrived) + seconds(kind, stage)
                done[kind, stage, micro] = now[place]
                next_of[place] += 1
                moved = True
        assert moved, "the order cannot be run"
    busy = tuple(sum(seconds(kind, stage) for kind, stage, _ in order) for order in orders)
    return Simulated(seconds=max(now), busy=busy)


def orders_of(plan: Plan) -> list[list[Pass]]:
    """Returns each process's passes."""
    return [order_of(plan, place) for place in range(plan.pipeline)]


def _needs(one: Pass, stages: int) -> list[Pass]:
    kind, stage, micro = one
    if kind == "forward":
        return [("forward", stage - 1, micro)] if stage else []
    if kind == "weights":
        return [("inputs", stage, micro)]
    return [("forward", stage, micro), *([(kind, stage + 1, micro)] if stage + 1 < stages else [])]
