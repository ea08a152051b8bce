"""Schedule: which trial is trained how far next, a function of the results known so far; successive halving (ASHA)."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from grappe.verbs.tune.study import Search, Trial

Result = tuple[float | None]
"""The objective that a job came to; None: its trial failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The training of one trial up to one rung."""

    number: int
    rung: int
    told: tuple[Trial, ...] = ()
    """Of a new trial: the trials before, as far as they had come when it was decided; by number."""


class Schedule:
    """Decides jobs as asynchronous successive halving does, with `search.lag` workers in simulated time.

    L. Li et al. (2020), "A system for massively parallel hyperparameter tuning": whenever a worker is free, the best of
    the highest rung that is among the first 1/halving of its rung, and was not promoted, goes on to the next rung; if
    there is none, a new trial begins. There, results come in the order in which trainings happen to end. Here a job
    takes as long as its part of a training, in time that is only counted: so the jobs depend on the results alone.
    Without halving there is one rung, and trial n knows the results of the trials up to n - lag.

    Args:
        total: trials in all.
        waits: whether what comes next depends on results. If not, all trials are given at once.
    """

    def __init__(self, search: Search, *, total: int, waits: bool) -> None:
        self._parts = parts(search)
        self._eta = search.halving or 1
        self._sign = -1.0 if search.maximize else 1.0
        self._total, self._waits, self._free = total, waits, search.lag if waits else total
        self._drawn = 0
        self._clock = Fraction(0)
        self._heap: list[tuple[Fraction, int, Job]] = []
        self._ended: list[dict[int, float | None]] = [{} for _ in self._parts]
        self._promoted: list[set[int]] = [set() for _ in self._parts]
        self._count = 0

    @property
    def over(self) -> bool:
        """Returns whether every job has been decided and told."""
        return not self._heap

    def decided(self, trial: Callable[[int], Trial | None]) -> Iterator[Job]:
        """Yields the jobs that are decided by what is known now, and were not yielded before.

        Args:
            trial: what is known of a trial; asked again after each job.
        """
        while True:
            while self._free and (job := self._decide(trial)) is not None:
                self._free -= 1
                self._count += 1
                before = self._parts[job.rung - 1] if job.rung else Fraction(0)
                took = self._parts[job.rung] - before
                heapq.heappush(self._heap, (self._clock + took, self._count, job))
                yield job
            if not self._heap or not self._tell(trial):
                return

    def _tell(self, trial: Callable[[int], Trial | None]) -> bool:
        """Takes in the result of the job that ends first in simulated time; returns whether there is one."""
        ends, _, job = self._heap[0]
        found = trial(job.number)
        if found is None or (result := result_of(found, job.rung)) is None:
            return False
        heapq.heappop(self._heap)
        self._clock = ends
        self._ended[job.rung][job.number] = result[0]
        self._free += self._waits
        return True

    def _decide(self, trial: Callable[[int], Trial | None]) -> Job | None:
        for rung in reversed(range(len(self._parts) - 1)):
            ended = self._ended[rung]
            ranked = sorted(
                (self._sign * value, number) for number, value in ended.items() if value is not None
            )
            for _, number in ranked[: len(ended) // self._eta]:
                if number not in self._promoted[rung]:
                    self._promoted[rung].add(number)
                    return Job(number=number, rung=rung + 1)
        if self._drawn == self._total:
            return None
        self._drawn += 1
        told = tuple(self._as_told(trial, number) for number in range(self._drawn - 1)) if self._waits else ()
        return Job(number=self._drawn - 1, rung=0, told=told)

    def _as_told(self, trial: Callable[[int], Trial | None], number: int) -> Trial:
        """The trial as this simulated time knows it."""
        found = trial(number)
        assert found is not None, "earlier trials are drawn first"
        values = [ended[number] for ended in self._ended if number in ended]
        rungs = tuple(value for value in values if value is not None)
        if len(rungs) < len(values):
            return dataclasses.replace(found, state="failed", value=None, rungs=())
        whole = len(rungs) == len(self._parts)
        return dataclasses.replace(
            found,
            state="complete" if whole else "paused" if rungs else "open",
            value=rungs[-1] if whole else None,
            rungs=rungs,
        )


def parts(search: Search) -> list[Fraction]:
    """The part of a whole training that each rung ends at."""
    eta, rungs = search.halving or 1, search.rungs
    return [Fraction(1, eta ** (rungs - 1 - rung)) for rung in range(rungs)]


def fewest_trials(halving: int, rungs: int) -> int:
    """Computes the number of trials until one of them reaches the last rung."""
    return math.prod([halving] * (rungs - 1))


def result_of(trial: Trial, rung: int) -> Result | None:
    """Returns a trial's result at a rung; None: it has not been trained so far."""
    if len(trial.rungs) > rung:
        return (trial.rungs[rung],)
    return (None,) if trial.state == "failed" else None
