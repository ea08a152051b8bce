"""Journal of a study: a file of which each line is a trial as it was from then on; Optuna draws from all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grappe.checkpoint.commit import write_all
from grappe.contrib.tune.space import Axis, Choices, SearchDefinition, Space, Trial, of_texts
from grappe.errors import RunError, UsageError, disk_advice
from grappe.fields import from_json
from grappe.launch import files

FILE = "trials.jsonl"
LARGEST = 1 << 28
"""Bytes of a file that is read: a line has about 200."""
STARTUP = 10
"""Trials that TPE draws at random, before it models the observed ones."""
CELLS = 10_000
FEWEST_COMPLETE = 8
"""Complete trials, below which nothing can be said about the importance of fields."""
STATES = {"open": "RUNNING", "paused": "PRUNED", "complete": "COMPLETE", "failed": "FAIL"}
"""By a trial's state: Optuna's."""


class Journal:
    """The trials of a study, and what they have come to.

    Each operation is one line: a kill leaves it done or not. Half a line at the end is none, and is overwritten.

    Attributes:
        trials: those that have begun, by number.

    Raises:
        RunError: the journal is damaged.
    """

    def __init__(self, folder: Path, search: SearchDefinition) -> None:
        self._file, self._search = folder / FILE, search
        content = files.read_bytes(self._file, largest=LARGEST) if files.kind(self._file) else b""
        self._size, space, trials = content.rfind(b"\n") + 1, of_texts(search.space), dict[int, Trial]()
        try:
            for line in content[: self._size].splitlines():
                trial = from_json(Trial, json.loads(line))
                complete, reached = trial.state == "complete", len(trial.rungs)
                for name, axis in space.items():
                    axis.value(trial.fields[name])
                if not all(map(math.isfinite, trial.rungs)) or (reached == len(search.parts)) != complete:
                    raise ValueError(f"trial {trial.number} is {trial.state}, and its rungs are {trial.rungs}")
                if trial.value != (trial.rungs[-1] if complete else None):
                    raise ValueError(f"trial {trial.number} is {trial.state}, and its value is {trial.value}")
                trials[trial.number] = trial
            if list(trials) != list(range(len(trials))):
                raise ValueError("a trial is missing")
        except (ValueError, KeyError, RecursionError) as error:
            raise RunError(f"{self._file} is damaged, or not of this version of grappe ({error})") from error
        self.trials = list(trials.values())

    @property
    def open(self) -> list[int]:
        """The numbers of the trials that have not ended."""
        return [trial.number for trial in self.trials if trial.state == "open"]

    def ask(self) -> int:
        """Draws the fields of a new trial, which are on disk then; returns its number.

        Raises:
            RunError: the disk is full, or may not be written.
        """
        self._write(Trial(number=len(self.trials), fields=draw(self._search, self.trials)))
        return len(self.trials) - 1

    def report(self, number: int, value: float, step: int) -> None:
        """Notes the objective at a trial's next rung; ends the trial at the last one, or if it is not promoted.

        One in `halving` is promoted of those that have come to the rung so far, and at least the best: ASHA (Li et al.
        2020), "A system for massively parallel hyperparameter tuning", but a trial that ended is not promoted later.
        """
        trial, sign = self.trials[number], -1.0 if self._search.maximize else 1.0
        rung, rungs = len(trial.rungs), (*trial.rungs, value)
        trial = dataclasses.replace(trial, rungs=rungs, step=step)
        if len(rungs) == len(self._search.parts):
            self._write(dataclasses.replace(trial, state="complete", value=value))
            return
        values = sorted(sign * each.rungs[rung] for each in (*self.trials, trial) if len(each.rungs) > rung)
        promoted = sign * value <= values[max(0, len(values) // (self._search.halving or 1) - 1)]
        self._write(trial if promoted else dataclasses.replace(trial, state="paused"))

    def fail(self, number: int, *, reason: str) -> None:
        """Ends a trial without an objective."""
        self._write(dataclasses.replace(self.trials[number], state="failed", reason=reason))

    def _write(self, trial: Trial) -> None:
        folder, line = self._file.parent, json.dumps(dataclasses.asdict(trial)) + "\n"
        try:
            with files.appender(self._file) as stream:
                stream.truncate(self._size)
                written = write_all(stream.fileno(), line.encode())
                os.fsync(stream.fileno())
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written: {error.strerror}: {disk_advice(error)}; then start the same command again"
            ) from error
        self._size += written
        self.trials[trial.number : trial.number + 1] = [trial]


def draw(search: SearchDefinition, trials: Sequence[Trial]) -> dict[str, str]:
    """Draws the next trial's fields, by the search, its seed and earlier results; untried ones while any are left."""
    space, number = of_texts(search.space), len(trials)
    if search.sampler == "grid":
        return grid(space)[number]
    samplers, study, drawn = find_optuna().samplers, _optuna_study(search, space, trials), dict[str, str]()
    study.ask()
    for name, axis in space.items():
        digest = hashlib.sha256(f"{search.seed}/{number}/{name}".encode()).digest()
        sampler = samplers.RandomSampler(seed := int.from_bytes(digest[:4], "big"))
        if search.sampler == "tpe":  # Bergstra et al. (2011), "Algorithms for hyper-parameter optimization"
            sampler = samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, constant_liar=True)
        value = sampler.sample_independent(study, study.trials[number], name, _distribution(axis))
        drawn[name] = value if isinstance(axis, Choices) else axis.text(value)
    if drawn in (tried := [trial.fields for trial in trials]):
        with contextlib.suppress(UsageError):  # a space that no grid fills has values enough
            untried = [cell for cell in grid(space) if cell not in tried] or [drawn]
            return random.Random(f"{search.seed}/{number}").choice(untried)
    return drawn


def importance(search: SearchDefinition, trials: Sequence[Trial]) -> dict[str, float]:
    """The share of each field in being a good trial; {} of too few trials.

    By PED-ANOVA (Watanabe et al. 2023).
    """
    if sum(trial.state == "complete" for trial in trials) < FEWEST_COMPLETE or len(search.space) < 2:
        return {}
    importances = find_optuna().importance
    study = _optuna_study(search, of_texts(search.space), trials)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is new
        shares = importances.get_param_importances(study, evaluator=importances.PedAnovaImportanceEvaluator())
    return {name: float(shares.get(name, 0.0)) for name in search.space}


def _optuna_study(search: SearchDefinition, space: Space, trials: Sequence[Trial]) -> Any:
    """Makes Optuna's study of these trials, in memory."""
    optuna, distributions = find_optuna(), {name: _distribution(axis) for name, axis in space.items()}
    study = optuna.create_study(direction="maximize" if search.maximize else "minimize")
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState[STATES[trial.state]],
                params={name: axis.value(trial.fields[name]) for name, axis in space.items()},
                distributions=distributions,
                value=trial.value,
                intermediate_values=dict(enumerate(trial.rungs)),
            )
        )
    return study


def _distribution(axis: Axis) -> Any:
    distributions = find_optuna().distributions
    if isinstance(axis, Choices):
        return distributions.CategoricalDistribution(axis.texts)
    kind = distributions.IntDistribution if axis.integer else distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.log)


def find_optuna() -> Any:
    """Imports Optuna.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UsageError("a search needs Optuna: pip install 'grappe[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


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
    if axis.integer and axis.high - axis.low < CELLS:
        return [str(value) for value in range(int(axis.low), int(axis.high) + 1)]
    raise UsageError(
        f"{field}={axis}: a grid needs values, for example {field}={axis.text(axis.low)},{axis.text(axis.high)}; "
        "ranges are for --sampler random and tpe"
    )
