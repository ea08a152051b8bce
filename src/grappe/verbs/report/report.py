"""grappe report: writes one HTML file of runs and measurements, which opens offline; long curves are thinned."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grappe.checkpoint.commit import LARGEST_JSON
from grappe.errors import RunError, UsageError
from grappe.errors.foreign_text import html_text, number, printable
from grappe.launch import files
from grappe.training.run import Run
from grappe.training.watchers.meter import USAGE
from grappe.verbs.foresee.run_forecast import foreseen_run
from grappe.verbs.tune.schedule import importance
from grappe.verbs.tune.space import Choices, Range, of_texts
from grappe.verbs.tune.study import FILE as STUDY
from grappe.verbs.tune.study import best_of, open_study

NAME = "report.html"
POINTS = 800  # of a curve; a screen has no more
NOT_CURVES = frozenset({"kind", "step", "epoch", "samples", "count", "seconds", "data", "device", "skipped"})
PARTS_OF_NOISE = frozenset({"steps", "variance", "gradient_square"})  # which the noise scale is made of
LISTS = {"measurement": "points", "lr-find": "curves"}
"""By kind of file: the list that it has."""

Points = list[tuple[float, float | None]]


def report(places: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Writes a report of `places`: runs' and studies' folders, files of grappe measure and lr-find (--out).

    Args:
        out: the file; None: report.html, in the run's folder if there is only one run, else in the current folder.

    Raises:
        RunError: one of `places` is neither a run nor a measurement.
        UsageError: `places` is empty, or the file cannot be written.
    """
    if not places:
        raise UsageError("nothing to report: give one or several runs (see: grappe runs)")
    paths = [Path(place) for place in places]
    gathered = gather(paths)
    alone = len(paths) == 1 and paths[0].is_dir()
    file = Path(out) if out is not None else (paths[0] / NAME if alone else Path(NAME))
    first = paths[0].resolve().name
    title = first if len(paths) == 1 else f"{first} and {len(paths) - 1} more"
    try:
        files.replace(file, html(gathered, title).encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}: give another with --out") from error
    return file


def gather(places: Sequence[Path]) -> dict[str, Any]:
    """Gathers the content of a report of `places`: runs' and studies' folders, files of grappe measure and lr-find.

    Raises:
        RunError: one of `places` is neither.
    """
    runs, measurements, searches, studies = [], [], [], []
    for place in places:
        if files.kind(place / STUDY) == "file":
            studies.append(gather_study(place))
        elif place.is_file() and place.suffix == ".json":
            content = _read_measurement(place)
            (searches if content["kind"] == "lr-find" else measurements).append(content)
        else:
            runs.append(_run(Run(place)))
    return {"runs": runs, "measurements": measurements, "learning_rates": searches, "studies": studies}


def _run(run: Run) -> dict[str, Any]:
    description = run.read_description()
    steps: dict[str, Points] = {}
    evaluations: dict[str, Points] = {}
    last = 0
    for record in run.records():
        kind = str(record.get("kind"))
        curves = {"step": steps, "evaluation": evaluations, "noise": evaluations}.get(kind)
        step = record.get("step")
        if curves is None or not isinstance(step, int):
            continue
        last = max(last, step)
        hidden = NOT_CURVES | PARTS_OF_NOISE if kind == "noise" else NOT_CURVES
        for name, value in record.items():
            if name not in hidden and _is_number(value, or_null=True):
                rounded = None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
                curves.setdefault(name, []).append((step, rounded))
    return {
        "name": run.folder.resolve().name,
        "status": run.read_status(description),
        "step": last,
        "description": {name: value for name, value in description.items() if name not in ("costs", "used")},
        "training": {name: thinned(curve) for name, curve in steps.items()},
        "validation": {name: thinned(curve) for name, curve in evaluations.items()},
        "usage": _usage(run),
        "processes": description.get("costs", []),
        "used": description.get("used", {}),
        "foreseen": foreseen_run(run).as_json(),
    }


def _usage(run: Run) -> list[dict[str, Any]]:
    """Reads a run's usage, neighbours merged until few remain: seconds are summed; of levels, the highest is kept."""
    try:
        lines = files.read_text(run.folder / USAGE).splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half of a line: a process was killed while it wrote
        phases = record.get("phases") if isinstance(record, dict) else None
        if isinstance(phases, dict) and _is_number(record.get("time")):
            records.append(record)
    while len(records) > POINTS // 2:
        pairs = [records[place : place + 2] for place in range(0, len(records), 2)]
        records = [_merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return records


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    seconds = number(a.get("seconds")) + number(b.get("seconds"))
    phases = dict(a["phases"])
    for name, value in b["phases"].items():
        phases[name] = number(phases.get(name)) + number(value)
    steps = number(a.get("steps")) + number(b.get("steps"))
    merged = {**b, "seconds": seconds, "steps": steps, "phases": phases}
    for name in ("watts", "memory"):
        if isinstance(a.get(name), dict) and isinstance(b.get(name), dict):
            merged[name] = {key: max(number(a[name].get(key)), number(value)) for key, value in b[name].items()}
    return merged


def thinned(curve: Points, points: int = POINTS) -> Points:
    """Thins a curve to about `points`: keeps the lowest and highest point of each piece, and every gap."""
    if len(curve) <= points:
        return curve
    size = math.ceil(2 * len(curve) / points)
    kept: Points = []
    for begin in range(0, len(curve), size):
        piece = curve[begin : begin + size]
        finite = [point for point in piece if point[1] is not None]
        if not finite:
            kept.append(piece[0])
            continue
        chosen = {extreme(finite, key=lambda point: point[1] or 0.0) for extreme in (min, max)}
        kept += sorted(chosen)
        if len(finite) < len(piece):
            kept.append((piece[-1][0], None))
    if kept[-1] != curve[-1]:
        kept.append(curve[-1])
    return kept


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
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    rows = []
    for trial in trials:
        value = trial.rungs[-1] if trial.rungs else None
        rows.append(
            {
                "number": trial.number,
                "state": trial.state,
                "reason": trial.reason,
                "value": value,
                "at_value": None if value is None else (value - low) / (high - low) if high > low else 0.5,
                "rungs": f"{len(trial.rungs)} of {search.rungs}",
                "texts": [trial.fields[name] for name in space],
                "at": [_place(axis, trial.fields[name]) for name, axis in space.items()],
                "best": trial is best,
            }
        )
    ends = {
        name: [axis.texts[0], axis.texts[-1]]
        if isinstance(axis, Choices)
        else [axis.text(axis.low), axis.text(axis.high)]
        for name, axis in space.items()
    }
    return {
        "name": folder.resolve().name,
        "task": search.task,
        "metric": search.metric,
        "maximize": search.maximize,
        "axes": [{"name": name, "ends": texts} for name, texts in ends.items()],
        "ends": [low, high],
        "trials": rows,
        "importance": importance(study, space),
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
        low, high, value = (math.log(end) if end > 0 else -math.inf for end in (low, high, value))
    place = (value - low) / (high - low)
    return min(1.0, max(0.0, place)) if math.isfinite(place) else None


def _read_measurement(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST_JSON:
            raise RunError(f"{file} is larger than any that grappe measure writes")
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in LISTS or not isinstance(content.get(LISTS[kind]), list):
        raise RunError(
            f"{file} is not a measurement: grappe measure TASK … --out {file.name} writes one, and so does grappe "
            "lr-find"
        )
    return {**content, "name": file.stem}


def html(gathered: dict[str, Any], title: str) -> str:
    """Renders the page. The gathered content is embedded as data, never as markup or code."""
    folder = Path(__file__).parent
    names = ("page.html", "page.css", "plots.js", "page.js")
    page, style, plots, code = ((folder / name).read_text() for name in names)
    # "<" would end the element that the data is in; JSON may write it otherwise.
    data = json.dumps(_finite(gathered), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html_text(title), "STYLE": style, "DATA": data, "CODE": plots + code}
    # In one pass: data is not looked through.
    return re.sub("@@([A-Z]+)@@", lambda match: parts[match[1]], page)


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON does not have, by null; text is made visible, as the page shows it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {printable(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Iterable):
        return [_finite(entry) for entry in value]
    return value


def _is_number(value: object, *, or_null: bool = False) -> bool:
    if value is None:
        return or_null
    return isinstance(value, int | float) and not isinstance(value, bool)
