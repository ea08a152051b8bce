"""Schedule: which trial is trained how far next, a function of the results so far; successive halving (ASHA)."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from grappe.verbs.tune.study import SearchDefinition, Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class RungJob:
    """The training of one trial up to one rung."""

    number: int
    rung: int
    observed: tuple[Trial, ...] = ()
    """Of a new trial: the earlier trials by number, as far as they had come when this job was decided."""


class Schedule:
    """Decides jobs as asynchronous successive halving does, with `search.parallel` workers in simulated time.

    L. Li et al. (2020), "A system for massively parallel hyperparameter tuning": whenever a worker is free, the best of
    the highest rung that is among the first 1/halving of its rung, and was not promoted, goes on to the next rung; if
    there is none, a new trial begins. There, results come in the order in which trainings happen to end. Here a job
    takes as long as its part of a training, in time that is only counted: so the jobs depend on the results alone.
    Without halving there is one rung, and trial n knows the results of the trials up to n - parallel.

    Args:
        total: trials in all.
        waits: whether what comes next depends on results. If not, all trials are decided at once.
    """

    def __init__(self, search: SearchDefinition, *, total: int, waits: bool) -> None:
        self._parts = parts(search)
        self._eta = search.halving or 1
        self._sign = -1.0 if search.maximize else 1.0
        self._total, self._waits, self._free_workers = total, waits, search.parallel if waits else total
        self._drawn = 0
        self._clock = Fraction(0)
        self._heap: list[tuple[Fraction, int, RungJob]] = []
        self._ended: list[dict[int, float | None]] = [{} for _ in self._parts]
        self._promoted: list[set[int]] = [set() for _ in self._parts]
        self._count = 0

    @property
    def over(self) -> bool:
        """True when every job has been decided, and its result taken in."""
        return not self._heap

    def decided(self, trial_of: Callable[[int], Trial | None]) -> Iterator[RungJob]:
        """Yields the jobs that follow from the results so far, and were not yielded before.

        Args:
            trial_of: returns a trial's record, if there is one; called again after each job.
        """
        while True:
            while self._free_workers and (job := self._next_job(trial_of)) is not None:
                self._free_workers -= 1
                self._count += 1
                before = self._parts[job.rung - 1] if job.rung else Fraction(0)
                duration = self._parts[job.rung] - before
                heapq.heappush(self._heap, (self._clock + duration, self._count, job))
                yield job
            if not self._heap:
                return
            # Take in the result of the job that ends first in simulated time.
            ends, _, job = self._heap[0]
            trial = trial_of(job.number)
            if trial is None or not has_result(trial, job.rung):
                return
            heapq.heappop(self._heap)
            self._clock = ends
            self._ended[job.rung][job.number] = (
                None if len(trial.rungs) <= job.rung else trial.rungs[job.rung]
            )
            self._free_workers += self._waits

    def _next_job(self, trial_of: Callable[[int], Trial | None]) -> RungJob | None:
        for rung in reversed(range(len(self._parts) - 1)):
            ended = self._ended[rung]
            ranked = sorted(
                (self._sign * value, number) for number, value in ended.items() if value is not None
            )
            for _, number in ranked[: len(ended) // self._eta]:
                if number not in self._promoted[rung]:
                    self._promoted[rung].add(number)
                    return RungJob(number=number, rung=rung + 1)
        if self._drawn == self._total:
            return None
        self._drawn += 1
        earlier = range(self._drawn - 1) if self._waits else ()
        observed = tuple(self._as_observed(trial_of(number), number) for number in earlier)
        return RungJob(number=self._drawn - 1, rung=0, observed=observed)

    def _as_observed(self, trial: Trial | None, number: int) -> Trial:
        """The trial as it is at this simulated time."""
        assert trial is not None, "earlier trials are drawn first"
        values = [ended[number] for ended in self._ended if number in ended]
        rungs = tuple(value for value in values if value is not None)
        if len(rungs) < len(values):
            return dataclasses.replace(trial, state="failed", value=None, rungs=())
        complete = len(rungs) == len(self._parts)
        return dataclasses.replace(
            trial,
            state="complete" if complete else "paused" if rungs else "open",
            value=rungs[-1] if complete else None,
            rungs=rungs,
        )


def parts(search: SearchDefinition) -> list[Fraction]:
    """The part of a training that each rung ends at."""
    eta, rungs = search.halving or 1, search.rungs
    return [Fraction(1, eta ** (rungs - 1 - rung)) for rung in range(rungs)]


def fewest_trials(halving: int, rungs: int) -> int:
    """Computes the number of trials until one of them reaches the last rung."""
    return math.prod([halving] * (rungs - 1))


def has_result(trial: Trial, rung: int) -> bool:
    """Returns whether a trial has been trained up to a rung, or has failed."""
    return len(trial.rungs) > rung or trial.state == "failed"
