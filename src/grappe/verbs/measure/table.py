"""Output of grappe measure: tables of points, lost efficiency and time breakdowns, and a file for grappe report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from grappe.language import translated_line
from grappe.verbs.measure import verdict
from grappe.verbs.measure.breakdown import SMALL_BATCH, USEFUL, Remedy, TimeBreakdown
from grappe.verbs.measure.points import Measurement, as_json, baseline, efficiency, efficiency_loss
from grappe.words import filled_table, first_line, plain_table, plan_name

if TYPE_CHECKING:
    from rich.table import Table

    from grappe.verbs.measure.explain import Explanation

COLUMNS = (
    "plan", "batch", "samples/s", "speed-up", "efficiency", "data, of a step", "communication", "imbalance",
    "memory, MB", "of reachable FLOP/s", "J a sample",
)  # fmt: skip
LEAST = 0.005  # of the time; what takes less is in one row together, or not shown
SENTENCES = 3


def table(points: Sequence[Measurement]) -> Table:
    """Makes the table of the points' figures; columns without a figure are left out."""
    first = next(point for point in points if not point.failure)
    return filled_table(COLUMNS, [_row(point, points, first) for point in points])


def _row(point: Measurement, points: Sequence[Measurement], first: Measurement) -> list[str]:
    title = plan_name(point.plan) + ("  (tried)" if point.origin == "advice" else "")
    if point.failure:
        cells = [title, str(point.batch or ""), f"failed: {first_line(point.failure)}"]
        return [*cells, *[""] * (len(COLUMNS) - len(cells))]
    base = baseline(point, points)
    return [
        title,
        f"{point.batch}",
        f"{point.rate:,.0f} ({min(point.rates):,.0f} to {max(point.rates):,.0f})",
        f"{point.rate / first.rate:.2f}" if len(points) > 1 else "",
        "" if base is None else f"{efficiency(point, base):.0%}",
        _share(point.share("data", "transfer")),
        _share(point.share("communication")),
        _share(point.imbalance / point.cost()),
        f"{point.memory / 1e6:,.0f}",
        "" if point.computed is None else f"{point.computed:.1%}",
        "" if point.joules is None else f"{point.joules:.3g}",
    ]


def losses(points: Sequence[Measurement]) -> Table | None:
    """Makes the table of efficiency losses, each compared with its baseline; None if nothing can be compared."""
    compared = [(point, base) for point in points if not point.failure and (base := baseline(point, points))]
    rows = []
    for point, base in compared:
        loss = efficiency_loss(point, base)
        parts = (loss.data, loss.communication, loss.imbalance, loss.computing, loss.rest)
        rows.append((verdict.title(point), *(_share(part, sign="+") for part in parts)))
    columns = ("data", "communication", "imbalance", "smaller slices, shared cores", "rest")
    return filled_table(("efficiency lost to", *columns), rows) if rows else None


def _share(part: float, sign: str = "") -> str:
    return f"{part:{sign}.0%}" if abs(part) >= LEAST else ""


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
            part, word, gain = (_shown(text) for text in (remedy.part, remedy.word, remedy.speed_up))
            yield f"{'then' if number else 'first'}: {part}{share}: {word} ({gain})"


def _shown(text: str) -> str:
    return translated_line(text, sys.stdout)


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
        rows.add_row(_shown(name), f"{share:.1%}", remedy.word, remedy.speed_up)
    if rest:
        rows.add_row("less than that, together", f"{rest:.1%}", "", "")
    return rows


def content(
    points: Sequence[Measurement], task: str, *, weak: bool = False, explanations: Sequence[Explanation] = ()
) -> dict[str, Any]:
    """Returns all figures as JSON's values, for --json, and for `grappe report`."""
    return {
        "kind": "measurement",
        "task": task,
        "weak": weak,
        "points": [as_json(point, points) for point in points],
        "why": [explanation.as_json() for explanation in explanations],
        "verdict": verdict.sentences(points),
    }
