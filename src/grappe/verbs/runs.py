"""grappe runs: lists runs, their status and progress, and verifies their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import verify
from grappe.checkpoint.format import list_checkpoints
from grappe.errors import RunError
from grappe.errors.foreign_text import number
from grappe.language import translated_name
from grappe.launch.safe_console import fact_table
from grappe.training.run import Run, all_runs
from grappe.verbs.submit.jobs import submitted
from grappe.words import filled_table, format_number, plan_name

if TYPE_CHECKING:
    from rich.table import Table

NO_SCORES = ("kind", "step", "samples", "count")


def listing(base: Path, tag: str | None = None) -> Table | str:
    """Makes a table of the runs under `base`; with `tag`, of those that have it."""
    runs = all_runs(base)
    entries = sorted(base.iterdir()) if base.is_dir() else []
    submissions = {entry: submitted(entry) for entry in entries if not Run.is_run(entry)}
    waiting = {entry: str(jobs[-1]["job"]) for entry, jobs in submissions.items() if jobs}
    if not runs and not waiting:
        return f"no run in {base}: grappe train digits makes one"
    rows = list[tuple[str, ...]]()
    for run in runs:
        try:
            description = run.read_description()
        except RunError:
            rows.append((run.folder.name, "", "run.json cannot be read", "", "", "", ""))
            continue
        tags = description.get("tags", [])
        if tag is not None and tag not in tags:
            continue
        evaluation = run.last_record("evaluation")
        step = str(run.step_reached(description) or "")
        plan = plan_name(description.get("plan"))
        status, name = run.read_status(description), description.get("name", "")
        scores = shown_scores(evaluation)
        rows.append((run.folder.name, name, status, scores, step, plan, ", ".join(tags)))
    if tag is None:
        rows += [(run.name, "", f"submitted, job {job}", "", "", "", "") for run, job in waiting.items()]
    elif not rows:
        return f"no run in {base} has the tag {tag}"
    return filled_table(("run", "name", "status", "validation", "step", "plan", "tags"), rows)


def facts(base: Path, folder: Path | None = None, tag: str | None = None) -> list[dict[str, Any]]:
    """Returns run.json, the status and the last evaluation of the run in `folder`, or of all runs under `base`.

    Args:
        tag: of the runs, those that have it; None: all.
    """
    return [
        {
            **(description := run.read_description()),
            "folder": str(run.folder),
            "status": run.read_status(description),
            "evaluation": run.last_record("evaluation"),
            "checkpoints": [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)],
        }
        for run in ([Run(folder)] if folder is not None else all_runs(base))
        if tag is None or tag in run.read_description().get("tags", [])
    ]


def describe(folder: Path) -> Table:
    """Describes one run in full."""
    run = Run(folder)
    description = run.read_description()
    rows = list[tuple[str, object]]()
    rows.append(("run", str(run.folder)))
    labels = {name: description.get(name) for name in ("name", "note")}
    for label, text in {**labels, "tags": ", ".join(description.get("tags", []))}.items():
        if text:
            rows.append((label, text))
    rows.append(("task", str(description.get("task"))))
    rows.append(("fields", _pairs(description.get("fields"), "=")))
    rows.append(("plan", plan_name(description.get("plan"))))
    status, restarts = run.read_status(description), description.get("restarts")
    rows.append(("status", f"{status}, restarts {restarts}" if restarts else status))
    rows.append(("started", f"{description.get('started')}, {description.get('host')}"))
    rows.append(("versions", _pairs(description.get("versions"), " ")))
    for change in description.get("changes", []):
        rows.append(("changed", str(change)))
    step = run.last_record("step")
    if step:
        loss = step.get("loss")
        shown = format_number(loss) if isinstance(loss, float) else str(loss)
        rows.append(("last step", f"{step.get('step')}, loss {shown}"))
    if evaluation := run.last_record("evaluation"):
        step, samples = evaluation.get("step"), evaluation.get("samples")
        rows.append(("evaluation", f"step {step}, {samples} samples: {shown_scores(evaluation)}"))
    if used := description.get("used"):
        rows.append(("used", _used(used)))
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
    joules = used.get("joules")
    for name, value in joules.items() if isinstance(joules, dict) else ():
        parts.append(
            f"{number(value):,.0f} J ({name})"
            if isinstance(value, int | float)
            else f"energy of {name} not measurable here"
        )
    watts = used.get("watts")
    for name, value in watts.items() if isinstance(watts, dict) else ():
        parts.append(f"peak {number(value):,.0f} W ({name})")
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
