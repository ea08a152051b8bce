"""Gathers a report's content from runs and measurements, as plain JSON; long curves are thinned, with peaks kept."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grappe.checkpoint.commit import LARGEST_JSON
from grappe.errors import RunError
from grappe.errors.foreign_text import html_text, number, printable
from grappe.launch import files
from grappe.training.run import Run
from grappe.training.watchers.meter import USAGE
from grappe.verbs.foresee.history import compared
from grappe.verbs.report.study import gather_study
from grappe.verbs.tune.study import FILE as STUDY

POINTS = 800  # of a curve; a screen has no more
NOT_CURVES = frozenset(
    {
        "kind",
        "step",
        "epoch",
        "samples",
        "count",
        "seconds",
        "skipped",
    }
)
PARTS_OF_NOISE = frozenset({"steps", "variance", "gradient_square"})  # which the noise scale is made of

Curve = list[tuple[float, float | None]]


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
            known = _written(place)
            (searches if known["kind"] == "lr-find" else measurements).append(known)
        else:
            runs.append(_run(Run(place)))
    return {"runs": runs, "measurements": measurements, "learning_rates": searches, "studies": studies}


def _run(run: Run) -> dict[str, Any]:
    known = run.read_description()
    steps: dict[str, Curve] = {}
    evaluations: dict[str, Curve] = {}
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
                curves.setdefault(name, []).append((step, _rounded(value)))
    return {
        "name": run.folder.resolve().name,
        "status": _status(run, known),
        "step": last,
        "description": {name: value for name, value in known.items() if name not in ("costs", "used")},
        "training": {name: thinned(curve) for name, curve in steps.items()},
        "validation": {name: thinned(curve) for name, curve in evaluations.items()},
        "usage": _thinned_usage(_usage(run)),
        "processes": known.get("costs") if isinstance(known.get("costs"), list) else [],
        "used": known.get("used") if isinstance(known.get("used"), dict) else {},
        "foreseen": compared(run).as_json(),
    }


def _status(run: Run, known: dict[str, Any]) -> str:
    if run.is_finished():
        return "finished"
    status = str(known.get("status") or "")
    return status if status in ("paused", "interrupted", "stopped") else "still going, or ended unexpectedly"


def _usage(run: Run) -> list[dict[str, Any]]:
    try:
        lines = files.read_text(run.folder / USAGE).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half of a line: a process was killed while it wrote
        if (
            isinstance(record, dict)
            and isinstance(record.get("phases"), dict)
            and _is_number(record.get("time"))
        ):
            found.append(record)
    return found


def _thinned_usage(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges neighbours until few enough remain: seconds are summed; of levels, the highest is kept."""
    while len(records) > POINTS // 2:
        pairs = [records[place : place + 2] for place in range(0, len(records), 2)]
        records = [_merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return records


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    seconds = number(a.get("seconds")) + number(b.get("seconds"))
    phases = dict(a["phases"])
    for name, value in b["phases"].items():
        phases[name] = number(phases.get(name)) + number(value)
    merged = {
        **b,
        "seconds": seconds,
        "steps": number(a.get("steps")) + number(b.get("steps")),
        "phases": phases,
    }
    for name in ("watts", "memory"):
        if isinstance(a.get(name), dict) and isinstance(b.get(name), dict):
            merged[name] = {
                key: max(number(a[name].get(key)), number(value)) for key, value in b[name].items()
            }
    return merged


def thinned(curve: Curve, points: int = POINTS) -> Curve:
    """Thins a curve to about `points`: keeps the lowest and highest point of each piece, and every gap."""
    if len(curve) <= points:
        return curve
    size = math.ceil(2 * len(curve) / points)
    kept: Curve = []
    for begin in range(0, len(curve), size):
        piece = curve[begin : begin + size]
        known = [point for point in piece if point[1] is not None]
        if not known:
            kept.append(piece[0])
            continue
        chosen = {min(known, key=_value), max(known, key=_value)}
        kept += sorted(chosen)
        if len(known) < len(piece):
            kept.append((piece[-1][0], None))
    if kept[-1] != curve[-1]:
        kept.append(curve[-1])
    return kept


def _value(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0


WRITTEN = {"measurement": "points", "lr-find": "curves"}
"""By kind of file: the list that it has."""


def _written(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST_JSON:
            raise RunError(f"{file} is larger than any that grappe measure writes")
        known = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    kind = known.get("kind") if isinstance(known, dict) else None
    if kind not in WRITTEN or not isinstance(known.get(WRITTEN[kind]), list):
        raise RunError(
            f"{file} is no measurement: grappe measure TASK … --out {file.name} writes one, and so does grappe lr-find"
        )
    return {**known, "name": file.stem}


def html(gathered: dict[str, Any], title: str) -> str:
    """Renders the page. The gathered content is embedded as data, never as markup or code."""
    folder = Path(__file__).parent
    names = ("page.html", "page.css", "plots.js", "page.js")
    page, style, plots, code = ((folder / name).read_text() for name in names)
    # "<" would end the element that the data is in; JSON may write it otherwise.
    data = json.dumps(_finite(gathered), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html_text(title), "STYLE": style, "DATA": data, "CODE": plots + code}
    return re.sub(
        "@@([A-Z]+)@@", lambda found: parts[found[1]], page
    )  # in one pass: data is not looked through


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON does not have, by null; text is made visible, as the page shows it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {printable(name): _finite(one) for name, one in value.items()}
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Iterable):
        return [_finite(one) for one in value]
    return value


def _is_number(value: object, *, or_null: bool = False) -> bool:
    if value is None:
        return or_null
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
