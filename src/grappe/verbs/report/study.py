"""Study: what a report shows of a search: each trial's place on each axis, and how much each field matters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from grappe.verbs.tune.sampler import importance
from grappe.verbs.tune.space import Choices, Range, Space, of_texts
from grappe.verbs.tune.study import Study, Trial, best_of, open_study


def gather_study(folder: Path) -> dict[str, Any]:
    """Gathers a study as plain JSON: its axes, and its trials with their places between 0 and 1.

    Raises:
        RunError: the folder is no study, or a damaged one.
    """
    study = open_study(folder)
    trials, search = study.trials, study.search
    space = of_texts(search.space)
    best = best_of(search, trials)
    values = [one.rungs[-1] for one in trials if one.rungs]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    return {
        "name": folder.resolve().name,
        "task": search.task,
        "metric": search.metric,
        "maximize": search.maximize,
        "axes": [{"name": name, "ends": list(_ends(axis))} for name, axis in space.items()],
        "ends": [low, high],
        "trials": [_row(study, one, space, low, high, is_best=one is best) for one in trials],
        "importance": importance(study, space),
    }


def _row(
    study: Study, trial: Trial, space: Space, low: float, high: float, *, is_best: bool
) -> dict[str, Any]:
    value = trial.rungs[-1] if trial.rungs else None
    return {
        "number": trial.number,
        "state": trial.state,
        "reason": trial.reason,
        "value": value,
        "at_value": None if value is None else (value - low) / (high - low) if high > low else 0.5,
        "rungs": f"{len(trial.rungs)} of {study.search.rungs}",
        "texts": [trial.fields[name] for name in space],
        "at": [_place(axis, trial.fields[name]) for name, axis in space.items()],
        "best": is_best,
    }


def _place(axis: Range | Choices, text: str) -> float | None:
    """The place of a value on its axis, from 0 to 1; None: it is not on it."""
    if isinstance(axis, Choices):
        if text not in axis.texts:
            return None
        return axis.texts.index(text) / max(1, len(axis.texts) - 1)
    try:
        value = float(text)
    except ValueError:
        return None
    low, high = axis.low, axis.high
    if axis.log:
        low, high, value = (math.log(one) if one > 0 else -math.inf for one in (low, high, value))
    place = (value - low) / (high - low)
    return min(1.0, max(0.0, place)) if math.isfinite(place) else None


def _ends(axis: Range | Choices) -> tuple[str, str]:
    if isinstance(axis, Choices):
        return axis.texts[0], axis.texts[-1]
    return axis.text(axis.low), axis.text(axis.high)
