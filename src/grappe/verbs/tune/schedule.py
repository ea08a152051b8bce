"""Schedule: which trial is trained how far next (ASHA), and with which fields: functions of the results so far."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from grappe.errors import UsageError
from grappe.verbs.tune.space import Axis, Choices, Range, Space, holds
from grappe.verbs.tune.study import SamplerName, SearchDefinition, Study, Trial

STARTUP = 10
"""Trials that TPE draws at random, before it models the observed ones."""
CELLS = 10_000
FEWEST_COMPLETE = 8
"""Complete trials, below which nothing can be said about the importance of fields."""


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
        self._parts = rung_parts(search)
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
            self._ended[job.rung][job.number] = dict(enumerate(trial.rungs)).get(job.rung)
            self._free_workers += self._waits

    def _next_job(self, trial_of: Callable[[int], Trial | None]) -> RungJob | None:
        for rung in reversed(range(len(self._parts) - 1)):
            ended = self._ended[rung]
            ranked = sorted((self._sign * value, number) for number, value in ended.items() if value is not None)
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
        if len(rungs) == len(self._parts):
            return dataclasses.replace(trial, state="complete", value=rungs[-1], rungs=rungs)
        return dataclasses.replace(trial, state="paused" if rungs else "open", value=None, rungs=rungs)


def rung_parts(search: SearchDefinition) -> list[Fraction]:
    """The part of a training that each rung ends at."""
    eta, rungs = search.halving or 1, search.rungs
    return [Fraction(1, eta ** (rungs - 1 - rung)) for rung in range(rungs)]


def has_result(trial: Trial, rung: int) -> bool:
    """Returns whether a trial has been trained up to a rung, or has failed."""
    return len(trial.rungs) > rung or trial.state == "failed"


def draw(
    search: SearchDefinition, space: Space, number: int, observed: Sequence[Trial], pending: Sequence[Trial]
) -> dict[str, str]:
    """The searched fields of trial `number`, as texts.

    Args:
        observed: earlier trials whose objectives it may depend on, by number.
        pending: earlier trials after those, whose objectives count as unknown.
    """
    if search.sampler == "grid":
        return grid(space)[number]
    if search.sampler == "random":
        fields = {}
        for field, axis in space.items():
            # The seed is a text: the same in every version of Python.
            part = random.Random(f"{search.seed}/{number}/{field}").random()
            chosen = isinstance(axis, Choices)
            fields[field] = axis.texts[int(part * len(axis.texts))] if chosen else axis.text(axis.at(part))
        return fields
    # Bergstra et al. (2011), "Algorithms for hyper-parameter optimization", by Optuna. A sampler of Optuna's keeps a
    # random state from one question to the next. Here each question has its own study, in memory, and its own seed: so
    # the answer does not depend on who asked before.
    digest = hashlib.sha256(f"{search.seed}/{number}".encode()).digest()
    tpe = _optuna().samplers.TPESampler(
        seed=int.from_bytes(digest[:4], "big"), n_startup_trials=STARTUP, constant_liar=True
    )
    study = as_optuna(space, observed, pending, sampler=tpe, maximize=search.maximize)
    values = study.ask({name: _distribution(axis) for name, axis in space.items()}).params
    return {name: axis.text(values[name]) if isinstance(axis, Range) else values[name] for name, axis in space.items()}


def learns(name: SamplerName) -> bool:
    """Returns whether later trials depend on the objectives of earlier ones."""
    return name == "tpe"


def check_sampler(name: SamplerName) -> None:
    """Raises UsageError where the sampler's library is not installed."""
    if learns(name):
        _optuna()


def grid(space: Space) -> list[dict[str, str]]:
    """All combinations, the last field changing fastest.

    Raises:
        UsageError: a field's range has no list of values; or there are too many combinations.
    """
    axes = {field: _values(field, axis) for field, axis in space.items()}
    if math.prod(map(len, axes.values())) > CELLS:
        raise UsageError(f"the grid has more than {CELLS:,} cells: give fewer values, or --sampler random")
    return [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]


def _values(field: str, axis: Axis) -> Sequence[str]:
    if isinstance(axis, Choices):
        return axis.texts
    if axis.integer and not axis.log and axis.high - axis.low < CELLS:
        return [str(value) for value in range(int(axis.low), int(axis.high) + 1)]
    spread = dict.fromkeys(axis.text(axis.at(part / 3)) for part in range(4))
    raise UsageError(
        f"{field}={axis}: a grid needs values, for example '{field}={'|'.join(spread)}'; "
        "ranges are for --sampler random and tpe"
    )


def as_optuna(
    space: Space, observed: Sequence[Trial], pending: Sequence[Trial] = (), *, sampler: Any = None, maximize: bool
) -> Any:
    """Makes a study of Optuna's, in memory, from trials."""
    optuna = _optuna()
    state = optuna.trial.TrialState
    read = {name: str if isinstance(axis, Choices) else int if axis.integer else float for name, axis in space.items()}
    distributions = {name: _distribution(axis) for name, axis in space.items()}
    study = optuna.create_study(sampler=sampler, direction="maximize" if maximize else "minimize")
    for place, trial in enumerate([*observed, *pending]):
        is_observed = place < len(observed)
        # Of trials that were stopped at a rung, those that came further are the better ones to TPE.
        stopped = state.PRUNED if trial.rungs else state.FAIL
        ended = stopped if trial.value is None else state.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                state=ended if is_observed else state.RUNNING,
                params={name: read[name](trial.fields[name]) for name in space},
                distributions=distributions,
                value=trial.value if is_observed else None,
                intermediate_values=dict(enumerate(trial.rungs)) if is_observed else None,
            )
        )
    return study


def importance(study: Study, space: Space) -> dict[str, float]:
    """The share of each field in being a good trial; {} without Optuna, or of too few trials.

    By PED-ANOVA (Watanabe et al. 2023).
    """
    trials = (trial for trial in study.trials if trial.state == "complete")
    complete = [trial for trial in trials if all(holds(axis, trial.fields[name]) for name, axis in space.items())]
    if len(complete) < FEWEST_COMPLETE or len(space) < 2:
        return {}
    try:
        import optuna
    except ImportError:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is new
        shares = optuna.importance.get_param_importances(
            as_optuna(space, complete, maximize=study.search.maximize),
            evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
        )
    return {name: float(shares.get(name, 0.0)) for name in space}


def _distribution(axis: Axis) -> Any:
    distributions = _optuna().distributions
    if isinstance(axis, Choices):
        return distributions.CategoricalDistribution(axis.texts)
    if axis.integer:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "--sampler tpe is Optuna's: pip install 'grappe[tune]', or take --sampler random, which needs nothing"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
