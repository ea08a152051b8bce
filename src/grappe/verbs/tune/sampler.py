"""Samplers: the fields of a trial, a function of the seed, the space, and the trials that were told before."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from grappe.errors import UsageError
from grappe.verbs.tune.space import Axis, Choices, Range, Space

Name = Literal["tpe", "random", "grid"]
STARTUP = 10
"""Trials that TPE draws at random, before it models what was told."""
CELLS = 10_000


class Told(Protocol):
    """A trial, as far as a sampler knows it."""

    @property
    def fields(self) -> dict[str, str]:
        """The searched fields, as texts."""

    @property
    def value(self) -> float | None:
        """The objective; None: the trial failed, or was stopped at a rung."""

    @property
    def rungs(self) -> tuple[float, ...]:
        """The objective at each rung so far; without successive halving there is one rung, the training's end."""


def draw(
    name: Name,
    space: Space,
    seed: int,
    number: int,
    told: Sequence[Told],
    pending: Sequence[Told],
    *,
    maximize: bool,
) -> dict[str, str]:
    """The searched fields of trial `number`, as texts.

    Args:
        told: earlier trials whose objectives it may depend on, by number.
        pending: earlier trials after those, whose objectives count as unknown.
    """
    if name == "grid":
        return grid(space)[number]
    if name == "random":
        return {field: _random(axis, f"{seed}/{number}/{field}") for field, axis in space.items()}
    return _tpe(space, _seed(seed, number), told, pending, maximize=maximize)


def learns(name: Name) -> bool:
    """Returns whether later trials depend on the objectives of earlier ones."""
    return name == "tpe"


def check(name: Name) -> None:
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
    if axis.whole and not axis.log and axis.high - axis.low < CELLS:
        return [str(value) for value in range(int(axis.low), int(axis.high) + 1)]
    spread = dict.fromkeys(axis.text(axis.at(part / 3)) for part in range(4))
    raise UsageError(
        f"{field}={axis}: a grid needs values, for example '{field}={'|'.join(spread)}'; "
        "ranges are for --sampler random and tpe"
    )


def _random(axis: Axis, seed: str) -> str:
    generator = random.Random(seed)  # of a text: the same in every version of Python
    if isinstance(axis, Choices):
        return axis.texts[int(generator.random() * len(axis.texts))]
    return axis.text(axis.at(generator.random()))


def _seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")


def _tpe(
    space: Space, seed: int, told: Sequence[Told], pending: Sequence[Told], *, maximize: bool
) -> dict[str, str]:
    """Bergstra et al. (2011), "Algorithms for hyper-parameter optimization", by Optuna.

    A sampler of Optuna's keeps a random state from one question to the next. Here each question has its own study, in
    memory, and its own seed: so the answer does not depend on who asked before.
    """
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, constant_liar=True)
    study = as_optuna(space, told, pending, sampler=sampler, maximize=maximize)
    asked = study.ask({name: _distribution(axis) for name, axis in space.items()}).params
    return {
        name: axis.text(asked[name]) if isinstance(axis, Range) else asked[name]
        for name, axis in space.items()
    }


def as_optuna(
    space: Space, told: Sequence[Told], pending: Sequence[Told] = (), *, sampler: Any = None, maximize: bool
) -> Any:
    """Makes a study of Optuna's, in memory, from trials."""
    optuna = _optuna()
    state = optuna.trial.TrialState
    distributions = {name: _distribution(axis) for name, axis in space.items()}
    study = optuna.create_study(sampler=sampler, direction="maximize" if maximize else "minimize")
    for trial, known in [*((one, True) for one in told), *((one, False) for one in pending)]:
        # Of trials that were stopped at a rung, those that came further are the better ones to TPE.
        stopped = state.PRUNED if trial.rungs else state.FAIL
        ended = stopped if trial.value is None else state.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                state=ended if known else state.RUNNING,
                params={name: _number(axis, trial.fields[name]) for name, axis in space.items()},
                distributions=distributions,
                value=trial.value if known else None,
                intermediate_values=dict(enumerate(trial.rungs)) if known else None,
            )
        )
    return study


def _distribution(axis: Axis) -> Any:
    distributions = _optuna().distributions
    if isinstance(axis, Choices):
        return distributions.CategoricalDistribution(axis.texts)
    if axis.whole:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _number(axis: Axis, text: str) -> Any:
    return text if isinstance(axis, Choices) else int(text) if axis.whole else float(text)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "--sampler tpe is Optuna's: pip install 'grappe[tune]', or take --sampler random, which needs nothing"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
