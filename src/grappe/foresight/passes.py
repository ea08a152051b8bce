"""Passes: the order in which each process of a pipeline runs microbatches forward and backward."""

from __future__ import annotations

from grappe.parallel.pipeline.rules import stages_each
from grappe.plan import Plan

Pass = tuple[bool, int, int]
"""Whether it is a forward, the stage, the microbatch."""


ORDERED = ("gpipe", "1f1b", "interleaved")
"""Schedules whose order is known."""


def order_of(plan: Plan, place: int) -> list[Pass]:
    """Returns the passes of the process at `place`, as torch.distributed.pipelining orders them."""
    made = dict(zip(ORDERED, (_gpipe, _one_f_one_b, _interleaved), strict=True))[plan.schedule]
    return made(plan.pipeline, place, plan.microbatches, stages_each(plan))


def _gpipe(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    return [(ahead, place, micro) for ahead in (True, False) for micro in range(micros)]


def _one_f_one_b(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    warm = min(micros, processes - place)
    order: list[Pass] = [(True, place, micro) for micro in range(warm)]
    for micro in range(micros):
        order.append((False, place, micro))
        if warm + micro < micros:
            order.append((True, place, warm + micro))
    return order


def _interleaved(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    """Orders passes as Narayanan et al. (2021, section 2.2), "Efficient large-scale … training on GPU clusters"."""
    rounds = max(1, micros // processes)
    group = micros // rounds
    total = micros * each

    def passed(number: int, ahead: bool) -> Pass:
        chunk = number // group % each
        chunk = chunk if ahead else each - 1 - chunk
        micro = number // (group * each) * group + number % group
        return ahead, chunk * processes + place, micro

    warm = min(total, (each - 1) * group + 2 * (processes - 1 - place))
    order = [passed(number, True) for number in range(warm)]
    for number in range(total):
        if warm + number < total:
            order.append(passed(warm + number, True))
        order.append(passed(number, False))
    return order
