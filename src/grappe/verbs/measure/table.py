"""Output of grappe measure: a table of points, a table of efficiency losses, and a file for grappe report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from grappe.errors import UsageError
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import Point, as_json, efficiency, lost
from grappe.verbs.measure.why import Why
from grappe.verbs.measure.why import as_json as why_as_json


def table(points: Sequence[Point]) -> Table:
    """Makes the table of the points' figures, with shares of a step in the later columns."""
    first = next(point for point in points if not point.failure)
    columns = ("plan", "batch", "samples/s", "per process", "speed-up", "efficiency", "data", "communication")
    more = ("imbalance", "memory", "of reachable", "J/sample")
    shown = Table(*columns, *more, box=None, padding=(0, 2, 0, 0))
    for point in points:
        title = (point.plan or "one process") + ("  (tried)" if point.origin == "advice" else "")
        if point.failure:
            shown.add_row(title, str(point.batch or ""), f"failed: {point.failure.splitlines()[0]}")
            continue
        low, high = min(point.rates), max(point.rates)
        whole = point.cost(*point.trials[0].processes[0].phases)
        shown.add_row(
            title,
            f"{point.batch}",
            f"{point.rate:,.0f} ({low:,.0f} to {high:,.0f})",
            f"{point.rate / point.processes:,.0f}",
            f"{point.rate / first.rate:.2f}",
            f"{efficiency(point, first):.0%}",
            f"{point.share('data', 'transfer'):.0%}",
            f"{point.share('communication'):.0%}",
            f"{point.imbalance / whole:.0%}",
            f"{point.memory / 1e6:,.0f} MB",
            "" if point.computed is None else f"{point.computed:.1%}",
            "not measurable here" if point.joules is None else f"{point.joules:.3g}",
        )
    return shown


def losses(points: Sequence[Point]) -> Table | None:
    """Makes the table of efficiency losses compared with the first point; None if there is only one point."""
    good = [point for point in points if not point.failure]
    if len(good) < 2:
        return None
    columns = (
        "efficiency lost to",
        "data",
        "communication",
        "imbalance",
        "smaller slices, shared cores",
        "rest",
    )
    shown = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for point in good[1:]:
        gone = lost(point, good[0])
        parts = (gone.data, gone.communication, gone.imbalance, gone.computing, gone.rest)
        shown.add_row(verdict.name(point), *(f"{part:+.0%}" for part in parts))
    return shown


def notes(points: Sequence[Point]) -> Iterator[str]:
    """Lists values that could not be measured, once for each reason."""
    reasons = {(what, reason) for point in points for what, reason in point.why.items()}
    for what, reason in sorted(reasons):
        label = {"processors": "energy of the processors", "gpu": "energy of the GPU", "flops": "operations"}
        yield f"{label.get(what, what)}: not measurable here: {reason}"


def write(
    points: Sequence[Point], task: str, file: Path, *, weak: bool = False, whys: Sequence[Why] = ()
) -> None:
    """Writes a file for `grappe report`.

    Raises:
        UsageError: the file cannot be written.
    """
    good = [point for point in points if not point.failure]
    content = {
        "kind": "measurement",
        "task": task,
        "weak": weak,
        "points": [as_json(point, good[0]) for point in points],
        "why": [why_as_json(one) for one in whys],
        "verdict": verdict.sentences(points),
    }
    try:
        file.write_text(json.dumps(content, indent=1))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
