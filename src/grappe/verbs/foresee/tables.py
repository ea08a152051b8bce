"""Output of grappe foresee: the answer in a sentence, tables of plans, and the file of --out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grappe.profiling.memory import free as free_memory
from grappe.training.watchers.expected_end import span
from grappe.verbs.foresee.foresee import Aim, PlanTimes, TimedPlan, best, merit, reason, with_one_process
from grappe.verbs.foresee.measured_step import MEMORY
from grappe.words import filled_table, format_bytes, format_seconds, plan_name

if TYPE_CHECKING:
    from rich.table import Table

SHORT = (
    "plan", "batch", "memory a process", "fits", "training", "step", "GPU-hours", "core-hours", "samples/s",
    "kWh at most",
)  # fmt: skip
MEMORY_PARTS = (
    "plan", "batch", "parameters", "gradients", "optimizer", "peak of a step", "of an evaluation",
    "checkpoint's copy", "fits",
)  # fmt: skip
TIME_PARTS = (
    "plan", "batch", "step", "compute", "communication", "bubble", "data", "samples/s", "training", "GPU-hours",
    "kWh at most", "core-hours",
)  # fmt: skip
FITS = {True: "yes", False: "no", None: "?"}
MOST_ROWS = 5
SHORT_TRAINING = 1 / 6  # hours, within which one process is enough
SMALL = 50e6  # bytes of a process, below which less is no better
ALIKE = 1.05  # figures of which neither is this many times the other are the same


def answer(times: PlanTimes, aim: Aim) -> list[str]:
    """Says which plan to take; of GPU-hours and core-hours, which are not compared, one sentence each."""
    kinds = [
        [timed for timed in times.plans if timed.cost is not None and timed.cost.on_gpus is gpu]
        for gpu in (True, False)
        if aim == "cheapest"
    ]
    comparable = [dataclasses.replace(times, plans=tuple(plans)) for plans in kinds if plans]
    return [_answer(several, aim) for several in comparable or [times]]


def _answer(times: PlanTimes, aim: Aim) -> str:
    usable = [timed for timed in times.plans if timed.foreseen.needs is not None]
    fitting = [timed for timed in usable if timed.foreseen.fits is not False]
    if not fitting:
        least = format_bytes(min(map(times.taken, usable)))
        return (
            f"None of them fits: the smallest takes {least} a process. Take more processes with shard=, more "
            "microbatches, recompute, or a smaller batch_size"
        )
    plain = with_one_process(usable)
    chosen = best(times, aim) or next((timed for timed in fitting if timed.foreseen.fits), fitting[0])
    if plain is not None and aim != "smallest" and all(_fits(times, timed) for timed in usable):
        within = plain.cost is not None and plain.cost.hours <= SHORT_TRAINING
        if chosen is plain or within:
            return f"Everything fits; one process is enough: {_details(times, plain)}"
    if len(usable) == 1:
        return f"{plan_name(chosen.foreseen.plan)}: {_details(times, chosen)}"
    close = _as_good(times, chosen, aim)
    others = f"; {close} other plan{'s' if close > 1 else ''} may be as good: grappe measure" if close else ""
    return f"Use {plan_name(chosen.foreseen.plan)}: {_details(times, chosen)}{others}"


def _fits(times: PlanTimes, timed: TimedPlan) -> bool:
    """Returns whether a plan fits for sure: on the site's GPU, or without a site in this machine's free memory."""
    if times.budget is not None:
        return timed.foreseen.fits is True
    free, needs = free_memory(), timed.foreseen.needs
    if needs is None or needs.most is None or free is None:
        return False
    return timed.foreseen.processes * (needs.most + needs.data) <= free * MEMORY


def _details(times: PlanTimes, timed: TimedPlan) -> str:
    parts = [f"{format_bytes(times.taken(timed))} a process"]
    if times.budget is not None and timed.foreseen.fits is not None:
        parts = [f"{format_bytes(times.taken(timed))} of {format_bytes(times.budget.size)} a process"]
    if timed.time is not None and timed.cost is not None:
        parts.append(f"about {_duration(timed.cost.hours)} (±{timed.time.spread:.0%})")
    return ", ".join(parts)


def _as_good(times: PlanTimes, chosen: TimedPlan, aim: Aim) -> int:
    """Counts the other plans that may be as good, within the uncertainty."""
    if aim == "smallest" or chosen.time is None:
        return 0
    most = merit(chosen, aim) * (1 + chosen.time.spread)
    return sum(
        merit(timed, aim) * (1 - timed.time.spread) <= most
        for timed in times.plans
        if timed is not chosen and timed.time is not None and timed.foreseen.fits is not False
    )


def shortlist(times: PlanTimes, aim: Aim) -> list[TimedPlan]:
    """Chooses at most MOST_ROWS plans, the best first: none of them is worse than another in memory and in time.

    Of plans that are as good, the first is taken, which is the plainest.
    """
    usable = [timed for timed in times.plans if timed.foreseen.needs is not None]
    usable = [timed for timed in usable if timed.foreseen.fits is not False] or usable
    usable = [timed for timed in usable if timed.time is not None] or usable

    def figures(timed: TimedPlan) -> tuple[float, ...]:
        cost, memory = timed.cost, max(times.taken(timed), SMALL)
        return (memory, timed.foreseen.processes) if cost is None else (memory, cost.hours, cost.unit_hours)

    def is_better(other: TimedPlan, timed: TimedPlan) -> bool:
        pairs = list(zip(figures(other), figures(timed), strict=True))
        if any(theirs > own * ALIKE for theirs, own in pairs):
            return False
        return any(theirs * ALIKE < own for theirs, own in pairs) or usable.index(other) < usable.index(timed)

    chosen, plain = best(times, aim), with_one_process(usable)
    kept = [
        timed for timed in usable if timed in (chosen, plain) or not any(is_better(other, timed) for other in usable)
    ]
    kept.sort(key=lambda timed: (timed is not chosen, figures(timed)[1:]))
    if len(kept) > MOST_ROWS:  # one process, with which all are compared, and the smallest stay
        stay = [kept[0], min(kept, key=times.taken), *([plain] if plain in kept else [])]
        others = [timed for timed in kept if timed not in stay][: MOST_ROWS - len(set(map(id, stay)))]
        kept = [timed for timed in kept if timed in stay or timed in others]
    return kept


def table(times: PlanTimes, plans: Sequence[TimedPlan], columns: Sequence[str] = SHORT) -> Table:
    """Makes a table of plans: bytes of the process that needs most, times of a step and of the training."""
    several = len({timed.foreseen.batch for timed in plans}) > 1
    cells = [_cells(times, timed) for timed in plans]
    columns = [column for column in columns if column != "batch" or several]
    if times.unit and times.unit not in columns and "GPU-hours" in columns:
        columns.insert(columns.index("GPU-hours") + 1, times.unit)
    return filled_table(columns, [[row.get(column, "-") for column in columns] for row in cells])


def _cells(times: PlanTimes, timed: TimedPlan) -> dict[str, str]:
    foreseen = timed.foreseen
    cells = {"plan": plan_name(foreseen.plan), "batch": str(foreseen.batch)}
    if foreseen.needs is not None:
        needs, states = foreseen.needs, foreseen.needs.states
        more_than = f"more than {format_bytes(states.total)}"
        cells |= {
            "memory a process": more_than if needs.most is None else format_bytes(times.taken(timed)),
            "parameters": format_bytes(states.parameters),
            "gradients": format_bytes(states.gradients),
            "optimizer": format_bytes(states.optimizer),
            "peak of a step": _range(needs.least, needs.peak) or more_than,
            "of an evaluation": _range(needs.evaluation_least, needs.evaluation) or "?",
            "checkpoint's copy": "?" if needs.checkpoint is None else format_bytes(needs.checkpoint),
        }
        if times.budget is not None:
            cells["fits"] = FITS[foreseen.fits]
    if timed.time is not None and timed.cost is not None:
        time, cost = timed.time, timed.cost
        cells |= {
            "step": f"{format_seconds(time.total)} ±{time.spread:.0%}",
            "samples/s": f"{cost.samples_per_second:,.0f}",
            "training": _duration(cost.hours),
        }
        for name in ("compute", "communication", "bubble", "data"):
            cells[name] = format_seconds(seconds) if (seconds := getattr(time, name)) else "-"
        cells["GPU-hours" if cost.on_gpus else "core-hours"] = _hours(cost.unit_hours)
        if cost.charge is not None:
            cells[times.unit] = _hours(cost.charge)
        if cost.kwh is not None:
            cells["kWh at most"] = f"{cost.kwh:.2g}"
    return cells


def notes(times: PlanTimes, *, everything: bool = False) -> list[str]:
    """Explains the figures: which plans cannot be foreseen, and what a process may have.

    Args:
        everything: also how the figures are foreseen.
    """
    forecasts = [timed.foreseen for timed in times.plans]
    lines = [reason(forecast.plan, forecast.why) for forecast in forecasts if forecast.needs is None]
    if any(forecast.needs is not None and forecast.needs.peak is None for forecast in forecasts):
        lines.append("more than …: grappe does not predict the activations of such a plan: measure whether it fits")
    if data := max((forecast.needs.data for forecast in forecasts if forecast.needs is not None), default=0):
        lines.append(f"in addition, each process and data worker keeps up to {format_bytes(data)} of the corpus")
    if times.budget is not None and not everything:
        lines.append("foreseen, not measured on that GPU: --all says how")
    elif times.budget is not None:
        lines.append(
            f"a process may have {format_bytes(times.budget.size)} ({times.budget.whose}); counted are the higher of "
            "both peaks, a tenth more for what the allocator cannot use, and 1.5 GB for CUDA and NCCL. Not measured on "
            "that GPU"
        )
    return [*lines, *(times.caveats if everything else ()), *times.notes]


def _range(least: int | None, most: int | None) -> str:
    if least is None or most is None:
        return ""
    texts = format_bytes(least), format_bytes(most)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def as_json(times: PlanTimes) -> dict[str, Any]:
    """Returns all of it as JSON's values."""
    return {
        "kind": "times",
        "gpu": times.gpu,
        "unit": times.unit,
        "plans": [
            dataclasses.asdict(timed)
            | {"time": timed.time and {**dataclasses.asdict(timed.time), "total": timed.time.total}}
            for timed in times.plans
        ],
        "notes": (*times.caveats, *times.notes),
    }


def _duration(hours: float) -> str:
    return span(3600 * hours) if hours >= 1 / 60 else f"{3600 * hours:.2g} s"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
