"""Passes: the order in which each process of a pipeline runs microbatches forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from grappe.parallel.pipeline.rules import stages_each
from grappe.plan import Plan

Kind = Literal["forward", "backward", "inputs", "weights"]
"""Kind of a pass; zero_bubble's backward is two: of the gradients of a stage's inputs, and of those of its weights."""
Pass = tuple[Kind, int, int]
"""Its kind, the stage, the microbatch."""


def order_of(plan: Plan, place: int) -> list[Pass]:
    """Returns the passes of the process at `place`, as torch.distributed.pipelining orders them."""
    made: dict[str, Callable[[int, int, int, int], list[Pass]]] = {
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "interleaved": _interleaved,
        "zero_bubble": _zero_bubble,
    }
    return made[plan.schedule](plan.pipeline, place, plan.microbatches, stages_each(plan))


def _gpipe(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    kinds: tuple[Kind, ...] = ("forward", "backward")
    return [(kind, place, micro) for kind in kinds for micro in range(micros)]


def _one_f_one_b(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    warm = min(micros, processes - place)
    order: list[Pass] = [("forward", place, micro) for micro in range(warm)]
    for micro in range(micros):
        order.append(("backward", place, micro))
        if warm + micro < micros:
            order.append(("forward", place, warm + micro))
    return order


def _interleaved(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    """Orders passes as Narayanan et al. (2021, section 2.2), "Efficient large-scale … training on GPU clusters"."""
    rounds = _Rounds(processes, place, micros, each)
    warm = min(rounds.total, (each - 1) * rounds.group + 2 * (processes - 1 - place))
    order = [rounds.passed("forward", number) for number in range(warm)]
    for number in range(rounds.total):
        if warm + number < rounds.total:
            order.append(rounds.passed("forward", warm + number))
        order.append(rounds.passed("backward", number))
    return order


def _zero_bubble(processes: int, place: int, micros: int, each: int) -> list[Pass]:
    """Orders passes as Qi et al. (2023, section 2.2), "Zero Bubble Pipeline Parallelism": ZB-H1."""
    rounds = _Rounds(processes, place, micros, each)
    warm = min(rounds.total, (each - 1) * rounds.group + processes - 1 - place)
    order = [rounds.passed("forward", number) for number in range(warm)]
    for number in range(rounds.total):
        if warm + number < rounds.total:
            order.append(rounds.passed("forward", warm + number))
        order.append(rounds.passed("inputs", number))
        if number >= place:
            order.append(rounds.passed("weights", number - place))
    behind = range(max(0, rounds.total - place), rounds.total)
    return order + [rounds.passed("weights", number) for number in behind]


class _Rounds:
    """Microbatches that go through a process's stages in rounds of one for each process."""

    def __init__(self, processes: int, place: int, micros: int, each: int) -> None:
        self._processes, self._place, self._each = processes, place, each
        self.group = micros // max(1, micros // processes)
        self.total = micros * each

    def passed(self, kind: Kind, number: int) -> Pass:
        """Returns the pass of this kind with this number."""
        chunk = number // self.group % self._each
        chunk = chunk if kind == "forward" else self._each - 1 - chunk
        micro = number // (self.group * self._each) * self.group + number % self.group
        return kind, chunk * self._processes + self._place, micro
