"""The table of foreseen times, the sentence on the best plan, and the file with all that was foreseen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from grappe.verbs.foresee.out import check_out, write_out
from grappe.verbs.foresee.times import Aim, Timed, Times, best, is_known, merit
from grappe.words import format_bytes, format_seconds

COLUMNS = ("plan", "batch", "step", "compute", "communication", "bubble", "data", "samples/s", "hours")
AIMS = {"fastest": "takes the least time", "cheapest": "costs least", "smallest": "needs the least memory"}


def table(times: Times) -> Table | None:
    """Makes the table; None: no time is known."""
    known = [one for one in times.plans if one.time is not None]
    if not known:
        return None
    made = Table(box=None, padding=(0, 2, 0, 0))
    unit = "GPU-hours" if times.gpu else "core-hours"
    for column in (*COLUMNS, unit, *(["kWh at most"] if times.gpu else [])):
        made.add_column(column, overflow="fold")
    for one in known:
        assert one.time is not None and one.cost is not None
        time, cost = one.time, one.cost
        parts = (time.compute, time.communication, time.bubble, time.data)
        cells = [f"{_seconds(time.total)} ±{time.spread:.0%}", *(_seconds(part) for part in parts)]
        cells += [f"{cost.samples_per_second:,.0f}", _hours(cost.hours), _hours(cost.unit_hours)]
        cells += [f"{cost.kwh:.2g}"] if cost.kwh is not None else []
        made.add_row(one.foreseen.plan or "one process", str(one.foreseen.batch), *cells)
    return made


def sentences(times: Times, aim: Aim) -> list[str]:
    """Says which plan is best under the aim, and what is not known."""
    lines = list(times.notes)
    chosen = best(times, aim)
    if chosen is None or sum(is_known(one, aim) for one in times.plans) == 1:
        return lines
    if aim == "smallest":
        return [*lines, f"smallest: {_name(chosen)}, with {format_bytes(int(merit(chosen, aim)))} a process"]
    assert chosen.time is not None
    close = _close(times, chosen, aim)
    return [*lines, f"{aim}: {_name(chosen)}, with {_seconds(chosen.time.total)} a step{close}"]


def write(times: Times, file: Path) -> None:
    """Writes all of it as JSON.

    Raises:
        UsageError: as `check_out`.
    """
    check_out(file)
    content = {
        "kind": "times",
        "gpu": times.gpu,
        "plans": [_as_json(one) for one in times.plans],
        "notes": times.notes,
    }
    write_out(file, json.dumps(content, indent=1) + "\n")


def _as_json(one: Timed) -> dict[str, Any]:
    time = None if one.time is None else {**dataclasses.asdict(one.time), "total": one.time.total}
    return {**dataclasses.asdict(one), "time": time}


def _close(times: Times, chosen: Timed, aim: Aim) -> str:
    """Names how many other plans may be as good, within what is not known."""
    assert chosen.time is not None
    most = merit(chosen, aim) * (1 + chosen.time.spread)
    others = sum(
        merit(one, aim) * (1 - one.time.spread) <= most
        for one in times.plans
        if one is not chosen and one.time is not None and one.foreseen.fits is not False
    )
    return (
        f"; {others} other plan{'s' if others > 1 else ''} may be as good: grappe measure" if others else ""
    )


def _name(one: Timed) -> str:
    return one.foreseen.plan or "one process"


def _seconds(value: float) -> str:
    return format_seconds(value) if value else "-"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
