"""Tunes how a training loads its samples: measures ways to load during its first steps, and keeps the quickest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from grappe.data.loading import Cost, Kind, Loading, search
from grappe.profiling.phases import COMMUNICATION, DATA, IN_A_STEP

Spent = Callable[[], tuple[int, Sequence[float]]]
"""Steps so far, and their seconds by phase."""

WARM = 4  # steps after a change: what was read ahead is used up, or is there
STEPS = 12
SECONDS = 1.0


class Tuner:
    """Measures ways to load, each for some steps of the training; no sample depends on the way.

    Each process measures for itself and does not ask the others. On a CPU waits for other processes are left out of
    what a step costs; beside a GPU the host waits for the device, whatever it is called.

    Args:
        first: the way that the training has begun with.
        kinds, most: what may be tried.
        spent: what steps have cost, of the training's chronometer.
        device: "cpu" or "cuda".
        chosen: told the quickest, once it is known.
        allowed: says whether there is memory for more workers.
        seconds: that a way is measured for at least.
    """

    def __init__(
        self,
        *,
        first: Loading,
        kinds: Sequence[Kind],
        most: int,
        spent: Spent,
        device: str,
        chosen: Callable[[Loading], None],
        allowed: Callable[[Loading], bool] = lambda loading: True,
        seconds: float = SECONDS,
    ) -> None:
        self._search = search(first, kinds, most, allowed)
        self._now = next(self._search)
        self._spent, self._chosen, self._on_cpu = spent, chosen, device == "cpu"
        self._seconds, self._steps = seconds, 0
        self._began = 0.0
        self._before: tuple[int, Sequence[float]] = (0, ())
        self.done = False
        """Whether the quickest way is known."""

    def step(self) -> Loading | None:
        """Counts a step; returns another way to load when the steps to come are to have one."""
        self._steps += 1
        if self._steps < WARM + STEPS:
            if self._steps == WARM:
                self._began, self._before = time.perf_counter(), self._spent()
            return None
        if time.perf_counter() - self._began < self._seconds:
            return None
        before, self._steps = self._now, 0
        try:
            self._now = self._search.send(self._cost())
        except StopIteration as end:
            self._now, self.done = end.value, True
            self._chosen(self._now)
        return self._now if self._now != before else None

    def _cost(self) -> Cost:
        (first, earlier), (last, now) = self._before, self._spent()
        spent = [after - then for after, then in zip(now, earlier, strict=True)][: len(IN_A_STEP)]
        total = sum(spent) - (spent[COMMUNICATION] if self._on_cpu else 0.0)
        return Cost(seconds=total / max(1, last - first), waits=spent[DATA] / (total or 1.0))
