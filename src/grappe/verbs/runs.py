"""grappe runs: lists runs, describes one and verifies its checkpoints; --race ranks them by what a score took."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import math
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grappe.checkpoint.commit import verify
from grappe.checkpoint.format import list_checkpoints
from grappe.errors import RunError, UsageError
from grappe.errors.foreign_text import entries, number
from grappe.language import translated_cell, translated_name
from grappe.launch.safe_console import fact_table
from grappe.launch.terminal import complain
from grappe.training.job_records import JOBS, submitted
from grappe.training.run import DESCRIPTION, DONE, Run, all_runs
from grappe.training.watchers.expected_end import span
from grappe.words import count_of, filled_table, format_number, plan_name

if TYPE_CHECKING:
    from rich.table import Table

UNREADABLE = "run.json cannot be read"
NO_SCORES = ("kind", "step", "samples", "count")
LONGEST_STATUS = 32  # characters of a status in the table; `grappe runs RUN` shows all of it
MOST_LISTED = 200
"""Runs in a table that is not asked for all: a thousand take seconds."""


def listing(base: Path, tag: str | None = None, *, everything: bool = False) -> Table | str:
    """Makes a table of the newest runs under `base`, the newest last; with `tag`, of all that have it."""
    runs = all_runs(base)
    older = 0 if everything or tag is not None else max(0, len(runs) - MOST_LISTED)
    if older:
        runs = sorted(runs, key=written_at)[older:]
    submissions = {folder: submitted(folder) for folder in sorted(base.glob("*")) if not Run.is_run(folder)}
    waiting = {entry: str(jobs[-1]["job"]) for entry, jobs in submissions.items() if jobs}
    if not runs and not waiting:
        return f"no run in {base}: grappe train digits makes one"
    dated = list[tuple[float, tuple[str, ...]]]()
    for run in runs:
        try:
            description = run.read_description()
        except RunError:
            dated.append((0.0, (run.folder.name, "", UNREADABLE, *[""] * 7)))
            continue
        tags = description.get("tags", [])
        if tag is not None and tag not in tags:
            continue
        evaluation = run.last_record("evaluation")
        step = str(run.step_reached(description) or "")
        plan = plan_name(description.get("plan"))
        status = textwrap.shorten(
            translated_cell(run.read_status(description), sys.stdout), LONGEST_STATUS, placeholder=" …"
        )
        began, seconds = started_at(description), number(entries(description.get("used")).get("seconds"))
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if began else ""
        took = "" if not seconds else span(seconds) if seconds >= 60 else f"{seconds:.0f} s"
        scores, name = shown_scores(evaluation), description.get("name", "")
        use, tagged = utilisation(description), ", ".join(tags)
        dated.append((began, (run.folder.name, name, status, scores, step, when, took, use, plan, tagged)))
    rows = [row for _, row in sorted(dated, key=lambda entry: entry[0])]
    for entry, job in waiting.items() if tag is None else ():
        tasks = [(file.parents[1] / DONE).exists() for file in entry.glob(f"*/logs/{JOBS}")]
        done = f"{sum(tasks)} of {len(tasks)}"
        rows.append(
            (entry.name, "", f"array, job {job}: {done} finished" if tasks else f"submitted, job {job}", *[""] * 7)
        )
    if tag is not None and not rows:
        return f"no run in {base} has the tag {tag}"
    if older:
        complain(f"grappe: {older:,} older runs are left out: --all shows them")
    return filled_table(("run", "name", "status", "validation", "step", "started", "time", "use", "plan", "tags"), rows)


def utilisation(description: Mapping[str, Any]) -> str:
    """Formats a run's mean use of its GPUs, "87%", or of its nodes' cores, "1.8/2 cores"; "": unknown."""
    used = entries(description.get("used"))
    if number(used.get("gpu_hours")):
        return f"{number(used.get('gpu')):.0%}" if "gpu" in used else ""
    cpu, core, seconds = (number(used.get(name)) for name in ("cpu_hours", "core_hours", "seconds"))
    return f"{cpu * 3600 / seconds:.1f}/{core * 3600 / seconds:.0f} cores" if seconds else ""


def written_at(run: Run) -> float:
    """Reads when a run's run.json was written, as time.time has it."""
    return (run.folder / DESCRIPTION).lstat().st_mtime


def last_run(base: Path) -> Path:
    """Finds the run under `base` that was written last.

    Raises:
        UsageError: there is none.
    """
    if not (runs := all_runs(base)):
        raise UsageError(f"no run in {base}: give one, or a file of grappe measure --out")
    return max(runs, key=written_at).folder


def started_at(description: Mapping[str, Any]) -> float:
    """Reads when a run's first start was, as time.time has it; 0.0: unknown."""
    try:
        return datetime.datetime.fromisoformat(str(description.get("started"))).timestamp()
    except ValueError:
        return 0.0


def facts(base: Path, folder: Path | None = None, tag: str | None = None) -> list[dict[str, Any]]:
    """Returns run.json, the status and the last evaluation of the run in `folder`, or of all runs under `base`.

    Args:
        tag: of the runs, those that have it; None: all.
    """
    entries = list[dict[str, Any]]()
    for run in [Run(folder)] if folder is not None else all_runs(base):
        try:
            description = run.read_description()
        except RunError as error:
            if folder is not None:
                raise
            entries.append({"folder": str(run.folder), "status": UNREADABLE, "error": str(error)})
            continue
        if tag is None or tag in description.get("tags", []):
            entries.append(
                {
                    **description,
                    "folder": str(run.folder),
                    "status": run.read_status(description),
                    "evaluation": run.last_record("evaluation"),
                    "utilisation": utilisation(description),
                    "checkpoints": [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)],
                }
            )
    return entries


def describe(folder: Path) -> Table:
    """Describes one run in full."""
    run = Run(folder)
    description = run.read_description()
    labels = {"name": description.get("name"), "note": description.get("note")}
    labels["tags"] = ", ".join(description.get("tags", []))
    status, restarts = run.read_status(description), description.get("restarts")
    rows = [
        ("run", str(run.folder)),
        *((label, text) for label, text in labels.items() if text),
        ("task", str(description.get("task"))),
        ("fields", _pairs(description.get("fields"), "=")),
        ("plan", plan_name(description.get("plan"))),
        ("status", f"{status}, restarts {restarts}" if restarts else status),
        ("started", f"{description.get('started')}, {description.get('host')}"),
        ("versions", _pairs(description.get("versions"), " ")),
    ]
    for change in description.get("changes", []):
        rows.append(("changed", str(change)))
    if step := run.last_record("step"):
        rows.append(("last step", f"{step.get('step')}, {shown_scores({'loss': step.get('loss')})}"))
    if evaluation := run.last_record("evaluation"):
        step, samples = evaluation.get("step"), evaluation.get("samples")
        rows.append(("evaluation", f"step {step}, {samples} samples: {shown_scores(evaluation)}"))
    if used := description.get("used"):
        rows.append(("used", _used(used)))
    if checked := description.get("checked"):
        largest = max(checked, key=lambda step: checked[step])
        several, apart = count_of(len(checked), "step"), f"{checked[largest]:.0e}"
        rows.append(("checked", f"{several} against one process: at most {apart} apart, in step {largest}"))
    for checkpoint in list_checkpoints(run.checkpoints):
        problem = verify(checkpoint.folder, str(description.get("id") or ""))
        name = checkpoint.folder.name
        rows.append(("checkpoint", f"{name}: {problem}" if problem else f"{name}: verified"))
    return fact_table(rows)


def _used(used: dict[str, Any]) -> str:
    """Formats the hours and energy of all starts."""
    parts = [
        f"{number(used.get(name)):.3g} {word}"
        for name, word in (("core_hours", "core-hours"), ("gpu_hours", "GPU-hours"))
        if number(used.get(name))
    ]
    joules = entries(used.get("joules")).items()
    parts += [f"{value:,.0f} J ({name})" for name, value in joules if isinstance(value, int | float)]
    parts += [f"peak {number(value):,.0f} W ({name})" for name, value in entries(used.get("watts")).items()]
    return ", ".join(parts)


def _pairs(named: Any, between: str) -> str:
    """Formats an entry of run.json as names and values; an entry that is no object is shown unchanged."""
    if not isinstance(named, dict):
        return str(named or "")
    return " ".join(f"{name}{between}{value}" for name, value in named.items())


def shown_scores(evaluation: Mapping[str, Any]) -> str:
    """Formats scores in the user's language."""
    return score_words(evaluation, loss=translated_name("loss"))


def score_words(evaluation: Mapping[str, Any], *, loss: str = "loss") -> str:
    """Formats scores, or those of an evaluation's record: loss 0.06640, accuracy 0.9833; `loss` is its word."""
    scores = {loss if name == "loss" else name: value for name, value in evaluation.items() if name not in NO_SCORES}
    return ", ".join(
        f"{name} {format_number(value) if isinstance(value, float) else value}" for name, value in scores.items()
    )


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


def race(base: Path, target: Target) -> list[dict[str, Any]]:
    """Returns each run under `base` that has the score, with its costs at the first evaluation that reached the target.

    Returns:
        Of each run: `run`, its owner `who`, `task`, `plan`, `hardware`, the `best` score, the validation `samples` of
        the last one, and `costs`: seconds of steps, samples, GPU-hours, core-hours, joules; None if it is not reached.

    Raises:
        RunError: no run has the score.
    """
    ranked, names = list[dict[str, Any]](), set[str]()
    for run in all_runs(base):
        try:
            about = run.read_description()
        except RunError:
            continue
        scores, samples, owner = dict[float, float](), 0, "unknown"
        for record in run.records("evaluation"):
            names.update(record)
            score = record.get(target.name)
            if isinstance(score, int | float) and abs(score) <= sys.float_info.max:  # an int of 400 digits is no float
                scores[number(record.get("step"))], samples = float(score), int(number(record.get("samples")))
        if not scores:
            continue
        with contextlib.suppress(KeyError, OSError):  # a user of another machine
            owner = run.folder.owner()
        reached = next((step for step in sorted(scores) if target.reached(scores[step])), None)
        ranked.append({
            "run": run.folder.name, "who": owner, "task": Path(str(about.get("task"))).stem,
            "plan": plan_name(about.get("plan")),
            "hardware": f"{about.get('processes') or 1} x {about.get('processor') or about.get('device')}",
            "best": (min if target.falls else max)(scores.values()), "samples": samples,
            "costs": None if reached is None else _costs(run, entries(about.get("used")), reached),
        })  # fmt: skip
    if not ranked:
        there = ", ".join(sorted(names.difference(NO_SCORES)))
        raise RunError(
            f"no run in {base} has a score called '{target.name}': "
            + (f"there are {there}" if there else "none has been evaluated")
        )
    return ranked


def _costs(run: Run, used: dict[str, Any], reached: float) -> dict[str, float]:
    """Returns the costs of a run up to a step; of hours and joules, its share by the seconds of steps."""
    steps = [[number(record.get(name)) for name in ("step", "seconds", "samples")] for record in run.records("step")]
    before = [step for step in steps if step[0] <= reached]
    seconds = sum(step[1] for step in before)
    part = seconds / (sum(step[1] for step in steps) or 1.0)
    return {
        "time": seconds,
        "samples": before[-1][2] if before else 0.0,
        "gpu-hours": part * number(used.get("gpu_hours")),
        "core-hours": part * number(used.get("core_hours")),
        "energy": part * sum(map(number, entries(used.get("joules")).values())),
    }


def board(ranked: list[dict[str, Any]], target: Target, by: By) -> Table:
    """Makes the board, task by task: runs that reached the target by their costs, then others by their best score."""
    sign = "<=" if target.falls else ">="
    columns = (
        "run", "place", "who", "task", f"{target.name} {sign} {target.value:g}", "validation samples",
        "time", "samples", "GPU-hours", "core-hours", "energy", "plan", "hardware",
    )  # fmt: skip

    def order(entry: dict[str, Any]) -> tuple[str, bool, float]:
        costs, best = entry["costs"], entry["best"]
        return entry["task"], costs is None, (costs[by] or math.inf) if costs else best if target.falls else -best

    places, rows = collections.Counter[str](), list[tuple[str, ...]]()
    for entry in sorted(ranked, key=order):
        costs, best = entry["costs"], f"best {format_number(entry['best'])}"
        places[entry["task"]] += costs is not None
        cells = [form.format(costs[name]) if costs and costs[name] else "-" for name, form in COST_FORMATS.items()]
        rows.append((
            entry["run"], str(places[entry["task"]]) if costs else "-", entry["who"], entry["task"],
            best if costs else f"not reached, {best}", f"{entry['samples']:,}", *cells,
            entry["plan"], entry["hardware"],
        ))  # fmt: skip
    return filled_table(columns, rows)
