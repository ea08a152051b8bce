"""Samplers: the fields of a trial, a function of the seed, the space, and the observed earlier trials."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

from grappe.errors import UsageError
from grappe.verbs.tune.space import Axis, Choices, Range, Space, holds
from grappe.verbs.tune.study import SamplerName, Study, Trial

STARTUP = 10
"""Trials that TPE draws at random, before it models the observed ones."""
CELLS = 10_000
FEWEST_COMPLETE = 8
"""Complete trials, below which nothing can be said about the importance of fields."""


def draw(
    name: SamplerName,
    space: Space,
    seed: int,
    number: int,
    observed: Sequence[Trial],
    pending: Sequence[Trial],
    *,
    maximize: bool,
) -> dict[str, str]:
    """The searched fields of trial `number`, as texts.

    Args:
        observed: earlier trials whose objectives it may depend on, by number.
        pending: earlier trials after those, whose objectives count as unknown.
    """
    if name == "grid":
        return grid(space)[number]
    if name == "random":
        return {field: _random(axis, f"{seed}/{number}/{field}") for field, axis in space.items()}
    # Bergstra et al. (2011), "Algorithms for hyper-parameter optimization", by Optuna. A sampler of Optuna's keeps a
    # random state from one question to the next. Here each question has its own study, in memory, and its own seed: so
    # the answer does not depend on who asked before.
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    tpe = _optuna().samplers.TPESampler(
        seed=int.from_bytes(digest[:4], "big"), n_startup_trials=STARTUP, constant_liar=True
    )
    study = as_optuna(space, observed, pending, sampler=tpe, maximize=maximize)
    values = study.ask({name: _distribution(axis) for name, axis in space.items()}).params
    return {
        name: axis.text(values[name]) if isinstance(axis, Range) else values[name]
        for name, axis in space.items()
    }


def learns(name: SamplerName) -> bool:
    """Returns whether later trials depend on the objectives of earlier ones."""
    return name == "tpe"


def check(name: SamplerName) -> None:
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


def _random(axis: Axis, seed: str) -> str:
    generator = random.Random(seed)  # of a text: the same in every version of Python
    if isinstance(axis, Choices):
        return axis.texts[int(generator.random() * len(axis.texts))]
    return axis.text(axis.at(generator.random()))


def as_optuna(
    space: Space,
    observed: Sequence[Trial],
    pending: Sequence[Trial] = (),
    *,
    sampler: Any = None,
    maximize: bool,
) -> Any:
    """Makes a study of Optuna's, in memory, from trials."""
    optuna = _optuna()
    state = optuna.trial.TrialState

    def number(axis: Axis, text: str) -> Any:
        return text if isinstance(axis, Choices) else int(text) if axis.integer else float(text)

    distributions = {name: _distribution(axis) for name, axis in space.items()}
    study = optuna.create_study(sampler=sampler, direction="maximize" if maximize else "minimize")
    for trial, is_observed in [
        *((trial, True) for trial in observed),
        *((trial, False) for trial in pending),
    ]:
        # Of trials that were stopped at a rung, those that came further are the better ones to TPE.
        stopped = state.PRUNED if trial.rungs else state.FAIL
        ended = stopped if trial.value is None else state.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                state=ended if is_observed else state.RUNNING,
                params={name: number(axis, trial.fields[name]) for name, axis in space.items()},
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
    complete = [
        trial
        for trial in study.trials
        if trial.state == "complete" and all(holds(axis, trial.fields[name]) for name, axis in space.items())
    ]
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
