"""Compares runs: what differs between them, their best and final scores, and their mean over seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.checkpoint.commit import read_json
from grappe.errors import RunError
from grappe.errors.foreign_text import entries, number, printable
from grappe.training.run import SCORES, Run
from grappe.words import plan_name

SEED = "seed"
FIGURES = ("best", "loss", "training_loss", "test", "seconds", "gpu_hours", "core_hours")
"""Of a row of results: what has a mean over seeds."""


def compared(runs: Sequence[Run]) -> dict[str, Any]:
    """Compares runs, as plain JSON.

    Returns:
        `metric`, the score that the runs are compared by, and whether a `lower` one is better; `keys`, the names of the
        fields that differ; `rows`, one for each run in order, with `label`, `differs` (by key) and FIGURES; `groups`,
        of runs that differ by seed alone: the numbers of their rows, and by figure their `mean` and `deviation`.

    Raises:
        RunError: a run.json is damaged.
    """
    descriptions = [run.read_description() for run in runs]
    settings = [_settings(description) for description in descriptions]
    names = sorted({key: 0 for each in settings for key in each}, key=lambda key: key == SEED)  # the seed last
    keys = [key for key in names if len({each.get(key) for each in settings}) > 1]
    evaluations = [list(run.records("evaluation")) for run in runs]
    metric = next((name for records in evaluations for name in _scores(records) if not name.startswith("loss")), "loss")
    lower = metric.startswith("loss") or any(metric in each.get("lower_is_better", ()) for each in descriptions)
    labels = _labels(runs, descriptions, settings, keys)
    rows = []
    for run, description, setting, records, label in zip(
        runs, descriptions, settings, evaluations, labels, strict=True
    ):
        scored = [(value, record.get("step")) for record in records if (value := _value(record, metric)) is not None]
        best, step = (min if lower else max)(scored, key=lambda pair: pair[0], default=(None, None))
        test = _test(run)
        used = description.get("used", {})
        rows.append(
            {
                "run": run.folder.resolve().name,
                "label": label,
                "tags": description.get("tags", []),
                "note": printable(description.get("note") or ""),
                "status": run.read_status(description),
                "plan": plan_name(description.get("plan")),
                "differs": {key: setting.get(key, "") for key in keys if key != "plan"},
                "best": best,
                "best_step": step,
                "loss": _value(records[-1], "loss") if records else None,
                "training_loss": _value(run.last_record("step"), "loss"),
                "test": _value({**test, **entries(test.get("metrics"))}, metric),
                "test_checkpoint": printable(test.get("checkpoint", ""), 200),
                **{name: number(used.get(name)) or None for name in ("seconds", "gpu_hours", "core_hours")},
            }
        )
    return {
        "metric": printable(metric, 60),
        "lower": lower,
        "keys": [key for key in keys if key != "plan"],
        "rows": rows,
        "groups": _groups(rows, settings) if SEED in keys else [],
    }


def _settings(description: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a user chose for a run, as texts: task, plan and fields."""
    fields = {printable(name, 60): printable(value, 200) for name, value in entries(description.get("fields")).items()}
    task = Path(str(description.get("task") or "")).name
    return {"task": printable(task, 100), "plan": plan_name(description.get("plan")), **fields}


def _labels(
    runs: Sequence[Run],
    descriptions: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, str]],
    keys: Sequence[str],
) -> list[str]:
    """Names each run by the user's name, or by what differs; several that are named the same also by their folder."""
    labels = []
    for description, setting in zip(descriptions, settings, strict=True):
        bare = ("task", "plan")
        parts = [setting.get(key, "") if key in bare else f"{key}={setting.get(key, '')}" for key in keys]
        labels.append(printable(description.get("name") or ", ".join(parts), 100))
    times = Counter(labels)
    folders = [run.folder.resolve().name for run in runs]
    return [
        label if label and times[label] == 1 else f"{label} ({folder})" if label else folder
        for label, folder in zip(labels, folders, strict=True)
    ]


def _groups(rows: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Returns the runs that differ by seed alone, with the mean and deviation of their figures."""
    groups = defaultdict(list)
    for place, setting in enumerate(settings):
        groups[tuple(item for item in setting.items() if item[0] != SEED)].append(place)
    made = []
    for places in groups.values():
        if len({settings[place].get(SEED) for place in places}) < 2:
            continue
        values = {name: [rows[place][name] for place in places if rows[place][name] is not None] for name in FIGURES}
        complete = {name: column for name, column in values.items() if len(column) == len(places)}
        made.append(
            {
                "rows": places,
                "mean": {name: statistics.fmean(column) for name, column in complete.items()},
                "deviation": {name: statistics.stdev(column) for name, column in complete.items()},
            }
        )
    return made


def _scores(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the names of the scores of the last evaluation that are single numbers."""
    last = records[-1] if records else {}
    return [name for name in last if name not in ("step", "samples", "count") and _value(last, name) is not None]


def _value(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(number(value)) and number(value) == value else None


def _test(run: Run) -> dict[str, Any]:
    """Reads the test scores that `grappe evaluate` left in the run's folder; {}: there are none."""
    try:
        return entries(read_json(run.folder / SCORES).get("test"))
    except RunError:
        return {}
