"""Output of grappe measure --why: a table for each plan, with what moves each part, and the largest gains in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from grappe.verbs.measure.remedies import SMALL_BATCH, Remedy
from grappe.verbs.measure.waterfall import USEFUL, Waterfall
from grappe.verbs.measure.why import Why

LEAST = 0.005  # of the time; what takes less is in one row together
SAID = 3


def tables(found: Sequence[Why]) -> Iterator[Table | str]:
    """Yields, for each plan, its table and sentences."""
    for one in found:
        title = f"{one.plan or 'one process'} (batch {one.batch})"
        if one.waterfall is None:
            yield f"{title}: its steps could not be traced: {one.failure}"
            continue
        yield ""
        yield table(one.waterfall, one.remedies, title)
        yield from sentences(one, title)


def table(fall: Waterfall, remedies: Sequence[Remedy], title: str) -> Table:
    """Makes the waterfall's table: shares that add up to 100 %."""
    shown = Table(
        f"{title}, {fall.seconds * 1e3:.4g} ms a step",
        "share",
        "what moves it",
        "gain",
        box=None,
        padding=(0, 2, 0, 0),
    )
    by_part = {remedy.part: remedy for remedy in remedies}
    rest = 0.0
    for part in fall.parts:
        share = fall.share(part)
        if share < LEAST and part != USEFUL:
            rest += share
            continue
        remedy = by_part.get(part)
        name = f"{USEFUL}, at the rate of {fall.precision}" if part == USEFUL else part
        shown.add_row(name, f"{share:.1%}", "" if remedy is None else remedy.word, _gain(remedy))
    if rest:
        shown.add_row("less than that, together", f"{rest:.1%}", "", "")
    return shown


def _gain(remedy: Remedy | None) -> str:
    if remedy is None or not remedy.saves:
        return ""
    return f"{'up to ' if remedy.at_most else ''}{remedy.gain:+.0%}"


def sentences(one: Why, title: str) -> Iterator[str]:
    """Says what would bring most."""
    known = [remedy for remedy in one.remedies if remedy.saves]
    if not known:
        yield f"{title}: nothing was found that would bring much"
    for place, remedy in enumerate(known[:SAID]):
        share = (
            ""
            if remedy.part == SMALL_BATCH or one.waterfall is None
            else (f" {one.waterfall.share(remedy.part):.0%}")
        )
        most = "at most " if remedy.at_most else "about "
        yield f"{'first' if not place else 'then'}: {remedy.part}{share}: {remedy.word} ({most}{remedy.gain:+.0%})"
