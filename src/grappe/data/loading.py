"""Ways in which a process loads its samples: itself, by threads or by workers; searches the quickest."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grappe.plan import Plan
from grappe.profiling.phases import COMMUNICATION, DATA, IN_A_STEP

Kind = Literal["threads", "processes"]

ENOUGH = 0.02  # of a step's time: a process that waits less for data has nothing to gain
FASTER = 0.95  # of the best so far; less than that may be noise
CLOSE = 0.8, 1.1  # of the best so far: measured again, by turns, since the machine may have changed meanwhile
TURNS = 3
FIRST = 8  # workers of a process with a GPU before anything is measured
SPARE = 1.1  # of data workers beyond what the average needs
MOST = 1024  # workers that a run's description may ask for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """A way to load samples; none changes a sample."""

    kind: Kind = "processes"
    workers: int = 0
    """Threads or processes; 0: the process loads its samples itself, when it needs them."""

    def __str__(self) -> str:
        """Writes it as a plan does."""
        return f"workers={self.workers}" + (f",loading={self.kind}" if self.workers else "")


class Cost(NamedTuple):
    """Cost of a step under a way to load."""

    seconds: float
    waits: float
    """The share of it that is spent waiting for data."""


def kinds_of(plan: Plan, *, keyed: bool) -> tuple[Kind, ...]:
    """Returns the kinds of workers that a plan allows for a dataset; threads need one that is keyed."""
    if plan.loading != "auto":
        return (plan.loading,)
    return ("threads", "processes") if keyed else ("processes",)


def search(
    first: Loading, kinds: Sequence[Kind], most: int, allowed: Callable[[Loading], bool] = lambda loading: True
) -> Generator[Loading, Cost, Loading]:
    """Yields ways to load, is sent the cost of each, and returns the quickest.

    Each kind is tried with as few workers as `first` has, then twice as many of the quicker one, until that is no
    gain; nothing is tried once a step hardly waits. With `most` workers as the first has, kinds alone are compared.
    Of two that are close each is yielded TURNS times, by turns, and their medians are compared.

    Args:
        allowed: says whether there is memory for more workers.
    """
    best, cost = first, (yield first)
    few = max(1, first.workers)
    for kind in kinds:
        candidate = Loading(kind=kind, workers=few)
        if candidate != first and cost.waits > ENOUGH and few <= most:
            best, cost, _ = yield from _tried(candidate, best, cost)
    while cost.waits > ENOUGH and 0 < best.workers < most:
        candidate = dataclasses.replace(best, workers=min(2 * best.workers, most))
        if not allowed(candidate):
            break
        best, cost, better = yield from _tried(candidate, best, cost)
        if not better:
            break
    return best


def _tried(candidate: Loading, best: Loading, cost: Cost) -> Generator[Loading, Cost, tuple[Loading, Cost, bool]]:
    ours, theirs = [cost], [(yield candidate)]
    if CLOSE[0] < theirs[0].seconds / cost.seconds < CLOSE[1]:
        for _ in range(TURNS - 1):
            ours.append((yield best))
            theirs.append((yield candidate))
    cost, candidate_cost = _median(ours), _median(theirs)
    better = candidate_cost.seconds < FASTER * cost.seconds
    return (candidate, candidate_cost, True) if better else (best, cost, False)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(values) for values in zip(*costs, strict=True)))


def workers_needed(waits: float, workers: int) -> int:
    """Estimates the data workers that keep up, of a process that waits a share `waits` of its steps with `workers`."""
    # Workers that cannot keep up load all the time: a batch takes them (workers x step) seconds.
    batch = waits if workers == 0 else workers * 1.0
    return math.ceil(SPARE * batch / max(1e-9, 1 - waits))


def record(loading: Loading, cores: int, device: str) -> dict[str, Any]:
    """Returns JSON for a run's description: what was measured to be quickest, and where."""
    return {"kind": loading.kind, "workers": loading.workers, "cores": cores, "device": device}


def recorded(record: object, kinds: Sequence[Kind], cores: int, device: str) -> Loading | None:
    """Reads what `record` wrote; None if there is none, or it was measured on another number of cores."""
    if not isinstance(record, Mapping) or (record.get("cores"), record.get("device")) != (cores, device):
        return None
    kind = next((kind_name for kind_name in kinds if kind_name == record.get("kind")), None)
    workers = record.get("workers")
    if kind is None or type(workers) is not int or not 0 <= workers <= MOST:
        return None
    return Loading(kind=kind, workers=workers)


Spent = Callable[[], tuple[int, Sequence[float]]]
"""Steps so far, and their seconds by phase."""

WARM = 4  # steps after a change: what was read ahead is used up, or is there
STEPS = 12
SECONDS = 1.0


class Tuner:
    """Measures ways to load, each for some steps of the training; no sample depends on the way.

    Each process measures for itself and does not ask the others. On a CPU waits for other processes are left out of
    what a step costs; with a GPU the host waits for the device, in whichever phase.

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

    def step(self) -> Loading | None:
        """Counts a step; returns another way to load when the steps to come are to have one."""
        self._steps += 1
        if self._steps < WARM + STEPS:
            if self._steps == WARM:
                self._began, self._before = time.perf_counter(), self._spent()
            return None
        if time.perf_counter() - self._began < self._seconds:
            return None
        (first, earlier), (last, now) = self._before, self._spent()
        spent = [after - then for after, then in zip(now, earlier, strict=True)][: len(IN_A_STEP)]
        total = sum(spent) - (spent[COMMUNICATION] if self._on_cpu else 0.0)
        cost = Cost(seconds=total / max(1, last - first), waits=spent[DATA] / (total or 1.0))
        before, self._steps = self._now, 0
        try:
            self._now = self._search.send(cost)
        except StopIteration as end:
            self._now = end.value
            self._chosen(self._now)
        return self._now if self._now != before else None
