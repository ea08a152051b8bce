"""Contention: measures what loading takes from the steps beside it: cores, and with threads the interpreter's lock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from grappe.data.source import Source
from grappe.data.tuning import Spent
from grappe.profiling.phases import COMMUNICATION, DATA, IN_A_STEP

BEFORE = 4  # steps that a held one is compared with
FIRST, SOON = 4, 11  # so many comparisons come soon, so many steps apart
EVERY = 29  # steps apart are the others: what is held is loaded later, which may slow the steps then
PAIRS = 32  # comparisons after which they become rarer
FEWEST = 6  # comparisons that say anything
BUDGET = (
    0.01  # of the steps: held although the next batch is not loaded yet, so that the training waits for it
)
WORTH = 0.02  # of the time: loading that computes less takes nothing that is worth a look


class Slowdown(NamedTuple):
    """Time that steps lose to loading beside them."""

    seconds: float
    """Of a step, for each second of a core that loading computes meanwhile: 0 on free cores, about 1 on taken ones."""
    error: float
    """Half the width of the interval in which it lies with a probability of 95 %."""


class Contention:
    """Holds loading during some steps, for which batches are ready, and compares them with the steps just before.

    The slowdown is the slope, through the origin, of the difference in a step's seconds over the difference in what
    loading has computed beside it; so a hold need not be complete. No sample depends on when it is loaded.

    Args:
        spent: what steps have cost, of the training's chronometer; None: nothing is held, loading's time is counted.
        on_cpu: whether the training computes on a CPU, where waits for other processes are left out of a step.
    """

    def __init__(self, spent: Spent | None = None, *, on_cpu: bool = True) -> None:
        self.computed = 0.0
        """CPU seconds that threads or worker processes have loaded samples beside steps: not while these waited."""
        self._spent, self._on_cpu = spent, on_cpu
        self._step, self._next = 0, SOON
        self._watched = self._held = False
        self._at_begin = (0.0, 0.0)
        self._before: list[tuple[float, float]] = []
        self._costly = 0
        self._pairs, self._xx, self._xy, self._yy = 0, 0.0, 0.0, 0.0

    def begin_step(self, source: Source, *, steady: bool) -> None:
        """Called when a step's batch is there; holds loading if it is this step's turn.

        Args:
            steady: whether the way to load stays as it is.
        """
        seconds = 0.0
        if self._spent is not None and self._step >= self._next - BEFORE:
            spent = self._spent()[1]
            seconds = self._seconds(spent)
            if self._step == self._next - BEFORE:
                self._watched = self.computed > WORTH * sum(spent[: len(IN_A_STEP)])
            self._watched &= steady
            if self._watched and self._step == self._next and self._affordable(source):
                source.hold()
                self._held = True
        self._at_begin = seconds, source.cpu_seconds()

    def end_step(self, source: Source) -> None:
        """Called after the step, when the next batch is asked for."""
        seconds, computed = self._at_begin
        computed = source.cpu_seconds() - computed
        self.computed += computed
        if self._watched and self._spent is not None:
            seconds = self._seconds(self._spent()[1]) - seconds
            if self._held:
                source.release()
                self._compare(seconds, computed)
            else:
                self._before.append((seconds, computed))
        if self._step >= self._next:
            self._next += SOON if self._pairs < FIRST else EVERY * (1 + self._pairs // PAIRS)
            self._watched = self._held = False
            self._before.clear()
        self._step += 1

    def slowdown(self) -> Slowdown | None:
        """Returns what was found; None: too few steps could be compared."""
        if self._pairs < FEWEST or self._xx <= 0:
            return None
        slope = self._xy / self._xx
        freedom = self._pairs - 1
        variance = max(0.0, self._yy - slope * self._xy) / freedom / self._xx
        quantile = 2 + 2.4 / freedom  # of Student's distribution, at 97.5 %, within 7 % from five degrees on
        return Slowdown(seconds=max(0.0, slope), error=quantile * math.sqrt(variance))

    def _affordable(self, source: Source) -> bool:
        if source.ready():
            return True
        if self._costly >= BUDGET * self._step:
            return False
        self._costly += 1
        return True

    def _seconds(self, spent: Sequence[float]) -> float:
        waits = spent[DATA] + (spent[COMMUNICATION] if self._on_cpu else 0.0)
        return sum(spent[: len(IN_A_STEP)]) - waits

    def _compare(self, seconds: float, computed: float) -> None:
        fewer = sum(one for one, _ in self._before) / BEFORE - seconds
        less = sum(one for _, one in self._before) / BEFORE - computed
        self._pairs += 1
        self._xx += less * less
        self._xy += less * fewer
        self._yy += fewer * fewer
