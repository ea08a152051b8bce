"""grappe runs --race: ranks runs by what they took to reach a score: time, samples, GPU-hours, core-hours or energy."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grappe.errors import RunError, UsageError
from grappe.errors.foreign_text import entries, number
from grappe.training.run import Run, all_runs
from grappe.words import filled_table, format_number, plan_name

if TYPE_CHECKING:
    from rich.table import Table

By = Literal["time", "samples", "gpu-hours", "core-hours", "energy"]
COST_FORMATS: dict[By, str] = {
    "time": "{:.1f} s",
    "samples": "{:,.0f}",
    "gpu-hours": "{:.3g}",
    "core-hours": "{:.3g}",
    "energy": "{:,.0f} J",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A score that runs are to reach."""

    name: str
    value: float
    falls: bool
    """Whether the score is to fall, as a loss is."""

    def reached(self, score: float) -> bool:
        """Returns whether `score` is as good as the target."""
        return score <= self.value if self.falls else score >= self.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoardEntry:
    """A run on the board."""

    run: str
    who: str
    """The run's owner."""
    task: str
    plan: str
    hardware: str
    best: float
    """The best score of all its evaluations."""
    samples: int
    """Validation samples of that score: fewer than all with --validation-batches."""
    costs: dict[str, float | None] | None
    """Until the target, by name: seconds of steps, samples, hours, joules; None: unknown. None: it is not reached."""


def target_of(text: str) -> Target:
    """Reads `accuracy=0.97`, or with a direction `perplexity<=20`; a score whose name begins with loss is to fall.

    Raises:
        UsageError: it is no name and number.
    """
    name, _, value = text.partition("=")
    try:
        goal = float(value)
    except ValueError:
        goal = math.nan
    sign, name = name[-1:], name.rstrip("<> ").strip()
    if not name or not math.isfinite(goal):
        raise UsageError(
            f"--race={text}: give a score and a number that it is to reach, as in accuracy=0.97 or 'perplexity<=20'"
        )
    falls = sign == "<" or (sign != ">" and name.removeprefix("training_").startswith("loss"))
    return Target(name=name, value=goal, falls=falls)


def race(base: Path, target: Target) -> list[BoardEntry]:
    """Returns an entry for each run under `base` whose evaluations have the score.

    Raises:
        RunError: none has it.
    """
    names: set[str] = set()
    entries = [entry for run in all_runs(base) if (entry := _entry(run, target, names)) is not None]
    if not entries:
        scores = ", ".join(sorted(names - {"kind", "step", "samples", "count"}))
        raise RunError(
            f"no run in {base} has a score called '{target.name}': "
            + (f"there are {scores}" if scores else "none has been evaluated")
        )
    return entries


def _entry(run: Run, target: Target, names: set[str]) -> BoardEntry | None:
    try:
        about = run.read_description()
    except RunError:
        return None
    scored, samples = [], dict[float, int]()
    for record in run.records("evaluation"):
        names.update(record)
        step, score = record.get("step"), record.get(target.name)
        numbers = isinstance(step, int) and isinstance(score, int | float)
        # An int of 400 digits is no float.
        if numbers and all(abs(value) <= sys.float_info.max for value in (step, score)):
            scored.append((step, float(score)))
            samples[float(score)] = int(number(record.get("samples")))
    if not scored:
        return None
    crossing = _crossing(scored, target)
    processes = about.get("processes") or 1
    best = (min if target.falls else max)(samples)
    return BoardEntry(
        run=run.folder.name,
        who=_owner(run.folder),
        task=Path(str(about.get("task"))).stem,
        plan=plan_name(about.get("plan")),
        hardware=f"{processes} x {about.get('processor') or about.get('device')}",
        best=best,
        samples=samples[best],
        costs=None if crossing is None else _costs(run, about, crossing),
    )


def _owner(folder: Path) -> str:
    try:
        return folder.owner()
    except (KeyError, OSError):  # a user of another machine
        return "unknown"


def _crossing(scored: list[tuple[int, float]], target: Target) -> float | None:
    """Returns the step, between two evaluations in proportion, at which the target is first reached."""
    before: tuple[int, float] | None = None
    for step, score in scored:
        if target.reached(score):
            if before is None or score == before[1]:
                return float(step)
            share = (target.value - before[1]) / (score - before[1])
            return before[0] + share * (step - before[0])
        before = (step, score)
    return None


def _costs(run: Run, about: dict[str, Any], crossing: float) -> dict[str, float | None]:
    """Returns what the run took until step `crossing`; of hours and joules, its share by the seconds of steps."""
    until = total = samples = 0.0
    for record in run.records("step"):
        step, seconds = number(record.get("step")), number(record.get("seconds"))
        share = min(1.0, max(0.0, crossing - (step - 1)))  # of this step's work
        until, total = until + share * seconds, total + seconds
        if share == 1.0:
            samples = number(record.get("samples"))
    used = entries(about.get("used"))
    part = until / total if total else 0.0
    values = entries(used.get("joules")).values()
    measured = [value for value in values if isinstance(value, int | float)]
    return {
        "time": until,
        "samples": samples,
        "gpu-hours": part * number(used.get("gpu_hours")) if used else None,
        "core-hours": part * number(used.get("core_hours")) if used else None,
        "energy": part * sum(measured) if measured else None,
    }


def board(entries: list[BoardEntry], target: Target, by: By) -> Table:
    """Makes the board, task by task: runs that reached the target by their costs, then others by their best score."""
    sign = "<=" if target.falls else ">="
    columns = (
        "run", "place", "who", "task", f"{target.name} {sign} {target.value:g}", "validation samples",
        "time", "samples", "GPU-hours", "core-hours", "energy", "plan", "hardware",
    )  # fmt: skip

    def order(entry: BoardEntry) -> tuple[str, bool, float]:
        if entry.costs is None:
            return entry.task, True, entry.best if target.falls else -entry.best
        cost = entry.costs[by]
        return entry.task, False, math.inf if cost is None else cost

    places, rows, most = collections.Counter[str](), list[tuple[str, ...]](), collections.Counter[str]()
    for entry in entries:
        most[entry.task] = max(most[entry.task], entry.samples)
    for entry in sorted(entries, key=order):
        costs = entry.costs
        places[entry.task] += costs is not None
        cells = [""] * len(COST_FORMATS)
        if costs is not None:
            cells = [form.format(costs[name]) if costs[name] else "-" for name, form in COST_FORMATS.items()]
        best = f"best {format_number(entry.best)}"
        reached = best if costs is not None else f"not reached, best {format_number(entry.best)}"
        fewer = f"{entry.samples:,} / {most[entry.task]:,}" if entry.samples < most[entry.task] else ""
        place = str(places[entry.task]) if costs is not None else "-"
        rows.append((entry.run, place, entry.who, entry.task, reached, fewer, *cells, entry.plan, entry.hardware))
    return filled_table(columns, rows)
