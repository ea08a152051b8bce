"""Tables of foreseen memory and times, sentences on the plan to take, and the file of --out."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from grappe.errors import UsageError
from grappe.foresight.search import Foreseen, MemoryBudget
from grappe.launch import files
from grappe.verbs.foresee.foresee import Aim, PlanTimes, TimedPlan, best, has_merit, merit, reason
from grappe.words import format_bytes, format_seconds, plan_name

MEMORY_COLUMNS = (
    "plan", "batch", "parameters", "gradients", "optimizer", "peak of a step", "of an evaluation", "checkpoint's copy",
)  # fmt: skip
TIME_COLUMNS = ("plan", "batch", "step", "compute", "communication", "bubble", "data", "samples/s", "hours")
FITS = {True: "yes", False: "no", None: "?"}


def memory_table(forecasts: Sequence[Foreseen], budget: MemoryBudget | None) -> Table:
    """Makes the table: bytes of the process that needs most."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in MEMORY_COLUMNS:
        table.add_column(column, overflow="fold")
    if budget is not None:
        table.add_column("fits")
    for forecast in forecasts:
        name = plan_name(forecast.plan)
        if forecast.needs is None:
            table.add_row(
                name, str(forecast.batch), *["-"] * (len(MEMORY_COLUMNS) - 2 + (budget is not None))
            )
            continue
        needs, states = forecast.needs, forecast.needs.states
        cells = [
            format_bytes(states.parameters),
            format_bytes(states.gradients),
            format_bytes(states.optimizer),
            _range(needs.least, needs.peak) or f"more than {format_bytes(states.total)}",
        ]
        cells.append(_range(needs.evaluation_least, needs.evaluation) or "?")
        cells.append("?" if needs.checkpoint is None else format_bytes(needs.checkpoint))
        table.add_row(
            name, str(forecast.batch), *cells, *([FITS[forecast.fits]] if budget is not None else [])
        )
    return table


def _range(least: int | None, most: int | None) -> str:
    if least is None or most is None:
        return ""
    texts = format_bytes(least), format_bytes(most)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def memory_sentences(forecasts: Sequence[Foreseen], budget: MemoryBudget | None) -> list[str]:
    """Says which plans cannot be foreseen, and which forecast to take for a site."""
    lines = [reason(forecast.plan, forecast.why) for forecast in forecasts if forecast.needs is None]
    if any(forecast.needs is not None and forecast.needs.peak is None for forecast in forecasts):
        lines.append(
            "more than …: the activations of such a plan are not foreseen, so whether it fits is measured"
        )
    if budget is None:
        return lines
    lines.append(
        f"a process may have {format_bytes(budget.size)} ({budget.whose}); counted are the higher of both peaks, a "
        "tenth more for what the allocator cannot use, and 1.5 GB for CUDA and NCCL. Not measured on that GPU"
    )
    fitting = next((forecast for forecast in forecasts if forecast.fits), None)
    needs = [
        forecast.needs
        for forecast in forecasts
        if forecast.needs is not None and forecast.needs.most is not None
    ]
    if fitting is not None and fitting.needs is not None and fitting.needs.most is not None:
        needed = format_bytes(budget.taken(fitting.needs))
        lines.append(f"the first that fits: {plan_name(fitting.plan)}, with {needed} a process")
    elif needs and not any(forecast.fits is None for forecast in forecasts if forecast.needs is not None):
        lines.append(
            f"none of them fits: the smallest takes {format_bytes(min(map(budget.taken, needs)))} a process. Take more "
            "processes with shard=, more microbatches, recompute, or a smaller batch_size"
        )
    return lines


def time_table(times: PlanTimes) -> Table | None:
    """Makes the table; None: no time is known."""
    with_time = [timed for timed in times.plans if timed.time is not None]
    if not with_time:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0))
    on_gpu = {_is_gpus(timed) for timed in with_time}
    units = [
        *(["GPU-hours", "kWh at most"] if True in on_gpu else []),
        *(["core-hours"] if False in on_gpu else []),
    ]
    for column in (*TIME_COLUMNS, *units):
        table.add_column(column, overflow="fold")
    for timed in with_time:
        assert timed.time is not None and timed.cost is not None
        time, cost = timed.time, timed.cost
        parts = (time.compute, time.communication, time.bubble, time.data)
        cells = [f"{_seconds(time.total)} ±{time.spread:.0%}", *(_seconds(part) for part in parts)]
        cells += [f"{cost.samples_per_second:,.0f}", _hours(cost.hours)]
        units_of = {"core-hours": _hours(cost.unit_hours)}
        if cost.kwh is not None:
            units_of = {"GPU-hours": _hours(cost.unit_hours), "kWh at most": f"{cost.kwh:.2g}"}
        cells += [units_of.get(unit, "-") for unit in units]
        table.add_row(plan_name(timed.foreseen.plan), str(timed.foreseen.batch), *cells)
    return table


def time_sentences(times: PlanTimes, aim: Aim) -> list[str]:
    """Says which plan is best under the aim, and what is unknown."""
    lines = list(times.notes)
    for several in _comparable(times, aim):
        chosen = best(several, aim)
        if chosen is None or sum(has_merit(timed, aim) for timed in several.plans) == 1:
            continue
        name = plan_name(chosen.foreseen.plan)
        if aim == "smallest":
            lines.append(f"smallest: {name}, with {format_bytes(int(merit(chosen, aim)))} a process")
        else:
            assert chosen.time is not None
            close = _close(several, chosen, aim)
            lines.append(f"{aim}: {name}, with {_seconds(chosen.time.total)} a step{close}")
    return lines


def _is_gpus(timed: TimedPlan) -> bool:
    return timed.cost is not None and timed.cost.kwh is not None


def _comparable(times: PlanTimes, aim: Aim) -> list[PlanTimes]:
    """Returns the plans that an aim compares: GPU-hours and core-hours are not compared with each other."""
    if aim != "cheapest":
        return [times]
    kinds = ([timed for timed in times.plans if _is_gpus(timed) is gpu] for gpu in (True, False))
    return [dataclasses.replace(times, plans=tuple(plans)) for plans in kinds if plans]


def write(times: PlanTimes, file: Path) -> None:
    """Writes all of it as JSON.

    Raises:
        UsageError: as `check_out`.
    """
    check_out(file)
    content = {
        "kind": "times",
        "gpu": times.gpu,
        "plans": [
            dataclasses.asdict(timed)
            | {"time": timed.time and {**dataclasses.asdict(timed.time), "total": timed.time.total}}
            for timed in times.plans
        ],
        "notes": times.notes,
    }
    try:
        files.replace(file, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise _unwritable(file, error.strerror) from error


def check_out(file: Path) -> None:
    """Checks the name and the folder of the file of --out, before there is anything to write.

    Raises:
        UsageError: the name has another ending than .json, or the file cannot be written.
    """
    if file.suffix != ".json":
        raise UsageError(f"--out={file}: the name has to end in .json")
    if not file.parent.is_dir():
        raise _unwritable(file, os.strerror(errno.ENOENT))
    if file.is_dir():
        raise _unwritable(file, os.strerror(errno.EISDIR))
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise _unwritable(file, os.strerror(errno.EACCES))


def _unwritable(file: Path, why: str | None) -> UsageError:
    return UsageError(f"{file} cannot be written: {why}: give another with --out")


def _close(times: PlanTimes, chosen: TimedPlan, aim: Aim) -> str:
    """Says how many other plans may be as good, within the uncertainty."""
    assert chosen.time is not None
    most = merit(chosen, aim) * (1 + chosen.time.spread)
    others = sum(
        merit(timed, aim) * (1 - timed.time.spread) <= most
        for timed in times.plans
        if timed is not chosen and timed.time is not None and timed.foreseen.fits is not False
    )
    return (
        f"; {others} other plan{'s' if others > 1 else ''} may be as good: grappe measure" if others else ""
    )


def _seconds(value: float) -> str:
    return format_seconds(value) if value else "-"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
