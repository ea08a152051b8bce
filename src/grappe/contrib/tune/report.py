"""Gathers a study for grappe report, which finds this module by its name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from grappe.contrib.tune.journal import importance
from grappe.contrib.tune.space import Choices, Range, of_texts
from grappe.contrib.tune.study import FILE, best_of, open_study

__all__ = ["FILE", "gather_study"]


def gather_study(folder: Path) -> dict[str, Any]:
    """Gathers a study as plain JSON: its axes, and its trials with their places between 0 and 1.

    Raises:
        RunError: the folder is no study, or a damaged one.
    """
    study = open_study(folder)
    trials, search = study.trials, study.search
    space = of_texts(search.space)
    best = best_of(search, trials)
    values = [trial.rungs[-1] for trial in trials if trial.rungs]
    low, high = min(values, default=0.0), max(values, default=0.0)
    rows = [
        {
            "number": trial.number,
            "state": trial.state,
            "reason": trial.reason,
            "value": trial.rungs[-1] if trial.rungs else None,
            "at_value": ((trial.rungs[-1] - low) / (high - low) if high > low else 0.5) if trial.rungs else None,
            "rungs": f"{len(trial.rungs)} of {len(search.parts)}",
            "texts": [trial.fields[name] for name in space],
            "at": [_place(axis, trial.fields[name]) for name, axis in space.items()],
            "best": trial is best,
        }
        for trial in trials
    ]
    axes = []
    for name, axis in space.items():
        ends = axis.texts if isinstance(axis, Choices) else (axis.text(axis.low), axis.text(axis.high))
        axes.append({"name": name, "ends": [ends[0], ends[-1]]})
    return {
        "name": folder.resolve().name,
        "task": search.task,
        "metric": search.metric,
        "maximize": search.maximize,
        "axes": axes,
        "ends": [low, high],
        "trials": rows,
        "importance": importance(search, trials),
    }


def _place(axis: Range | Choices, text: str) -> float:
    """The place of a value on its axis, from 0 to 1."""
    if isinstance(axis, Choices):
        return axis.texts.index(text) / max(1, len(axis.texts) - 1)
    low, high, value = axis.low, axis.high, float(text)
    if axis.log:
        low, high, value = map(math.log, (low, high, value))
    return (value - low) / (high - low)
