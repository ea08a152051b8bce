"""Output of grappe measure: tables of points, lost efficiency and time breakdowns, and a file for grappe report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import UsageError
from grappe.verbs.measure import verdict
from grappe.verbs.measure.breakdown import SMALL_BATCH, USEFUL, Remedy, TimeBreakdown
from grappe.verbs.measure.points import Measurement, as_json, efficiency, efficiency_loss
from grappe.words import first_line, plain_table, plan_name

if TYPE_CHECKING:
    from rich.table import Table

    from grappe.verbs.measure.explain import Explanation

LEAST = 0.005  # of the time; what takes less is in one row together
SENTENCES = 3


def table(points: Sequence[Measurement]) -> Table:
    """Makes the table of the points' figures, with shares of a step in the later columns."""
    first = next(point for point in points if not point.failure)
    columns = ("plan", "batch", "samples/s", "per process", "speed-up", "efficiency", "data", "communication")
    rows = plain_table(*columns, "imbalance", "memory", "of reachable", "J/sample")
    for point in points:
        title = plan_name(point.plan) + ("  (tried)" if point.origin == "advice" else "")
        if point.failure:
            rows.add_row(title, str(point.batch or ""), f"failed: {first_line(point.failure)}")
            continue
        rows.add_row(
            title,
            f"{point.batch}",
            f"{point.rate:,.0f} ({min(point.rates):,.0f} to {max(point.rates):,.0f})",
            f"{point.rate / point.processes:,.0f}",
            f"{point.rate / first.rate:.2f}",
            f"{efficiency(point, first):.0%}",
            f"{point.share('data', 'transfer'):.0%}",
            f"{point.share('communication'):.0%}",
            f"{point.imbalance / point.cost():.0%}",
            f"{point.memory / 1e6:,.0f} MB",
            "" if point.computed is None else f"{point.computed:.1%}",
            "not measurable here" if point.joules is None else f"{point.joules:.3g}",
        )
    return rows


def losses(points: Sequence[Measurement]) -> Table | None:
    """Makes the table of efficiency losses compared with the first point; None if there is only one point."""
    measured = [point for point in points if not point.failure]
    if len(measured) < 2:
        return None
    columns = ("data", "communication", "imbalance", "smaller slices, shared cores", "rest")
    rows = plain_table("efficiency lost to", *columns)
    for point in measured[1:]:
        loss = efficiency_loss(point, measured[0])
        parts = (loss.data, loss.communication, loss.imbalance, loss.computing, loss.rest)
        rows.add_row(verdict.name(point), *(f"{part:+.0%}" for part in parts))
    return rows


def notes(points: Sequence[Measurement]) -> Iterator[str]:
    """Lists values that could not be measured, once for each reason."""
    reasons = {(what, reason) for point in points for what, reason in point.unmeasured.items()}
    for what, reason in sorted(reasons):
        label = {"processors": "energy of the processors", "gpu": "energy of the GPU", "flops": "operations"}
        yield f"{label.get(what, what)}: not measurable here: {reason}"


def explained(explanations: Sequence[Explanation]) -> Iterator[Table | str]:
    """Yields, for each plan, the table of its time's parts, and the largest gains in words."""
    for explanation in explanations:
        title = f"{plan_name(explanation.plan)} (batch {explanation.batch})"
        breakdown = explanation.breakdown
        if breakdown is None:
            yield f"{title}: its steps could not be traced: {explanation.failure}"
            continue
        yield ""
        yield breakdown_table(breakdown, explanation.remedies, title)
        helpful = [remedy for remedy in explanation.remedies if remedy.saves]
        if not helpful:
            yield f"{title}: nothing was found that would bring much"
        for number, remedy in enumerate(helpful[:SENTENCES]):
            share = "" if remedy.part == SMALL_BATCH else f" {breakdown.share(remedy.part):.0%}"
            gain = f"{'at most ' if remedy.at_most else 'about '}{remedy.gain:+.0%}"
            yield f"{'then' if number else 'first'}: {remedy.part}{share}: {remedy.word} ({gain})"


def breakdown_table(breakdown: TimeBreakdown, remedies: Sequence[Remedy], title: str) -> Table:
    """Makes the table of a step's parts: shares that add up to 100 %."""
    heading = f"{title}, {breakdown.seconds * 1e3:.4g} ms a step"
    rows = plain_table(heading, "share", "what moves it", "gain")
    by_part = {remedy.part: remedy for remedy in remedies}
    rest = 0.0
    for part in breakdown.parts:
        share = breakdown.share(part)
        if share < LEAST and part != USEFUL:
            rest += share
            continue
        name = f"{USEFUL}, at the rate of {breakdown.precision}" if part == USEFUL else part
        remedy = by_part.get(part, Remedy(part=part, word=""))
        gain = f"{'up to ' if remedy.at_most else ''}{remedy.gain:+.0%}" if remedy.saves else ""
        rows.add_row(name, f"{share:.1%}", remedy.word, gain)
    if rest:
        rows.add_row("less than that, together", f"{rest:.1%}", "", "")
    return rows


def write(
    points: Sequence[Measurement],
    task: str,
    file: Path,
    *,
    weak: bool = False,
    explanations: Sequence[Explanation] = (),
) -> None:
    """Writes a file for `grappe report`.

    Raises:
        UsageError: the file cannot be written.
    """
    first = next(point for point in points if not point.failure)
    content = {
        "kind": "measurement",
        "task": task,
        "weak": weak,
        "points": [as_json(point, first) for point in points],
        "why": [explanation.as_json() for explanation in explanations],
        "verdict": verdict.sentences(points),
    }
    try:
        file.write_text(json.dumps(content, indent=1))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
