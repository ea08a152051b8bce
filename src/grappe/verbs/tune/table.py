"""Shows a study: a row for each trial, and the best fields, ready to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rich.table import Table

from grappe.errors import RunError
from grappe.training.run import Run
from grappe.verbs.tune.coordinator import SearchProgress
from grappe.verbs.tune.schedule import parts
from grappe.verbs.tune.space import PLAN
from grappe.verbs.tune.study import Search, Study, Trial, best_of

LIVE_ROWS = 15


def table(
    study: Study,
    trials: Sequence[Trial],
    running: frozenset[int] = frozenset(),
    most: int | None = None,
    seconds: Mapping[int, float] | None = None,
) -> Table:
    """A row for each trial, of the last `most`; the best is marked.

    Args:
        seconds: by number, what the trainings took; None: no column for them.
    """
    names = list(study.search.space)
    time = ["seconds"] if seconds is not None else []
    found = Table("trial", study.search.metric, *time, *names, "", box=None, padding=(0, 2, 0, 0))
    best = best_of(study.search, trials)
    for trial in trials[-most:] if most else trials:
        value = f"{trial.rungs[-1]:.6g}" if trial.rungs and trial.state != "failed" else ""
        what = trial.reason or trial.state
        if trial.number in running:
            what = "running"
        elif trial.state == "paused":
            what = f"stopped after {parts(study.search)[len(trial.rungs) - 1]}"
        elif trial.state == "complete":
            what = "best" if trial is best else ""
        elif trial.state == "failed":
            what = f"failed: {trial.reason}"
        took = (
            [f"{seconds[trial.number]:.1f}" if trial.number in seconds else ""] if seconds is not None else []
        )
        found.add_row(str(trial.number), value, *took, *(trial.fields[name] for name in names), what)
    return found


def summary(progress: SearchProgress) -> str:
    """One line: how far the study is."""
    states = [trial.state for trial in progress.trials]
    ended = states.count("complete") + states.count("failed")
    words = [f"{ended} of {progress.total} trials ended"]
    if states.count("failed"):
        words.append(f"{states.count('failed')} failed")
    if states.count("paused"):
        words.append(f"{states.count('paused')} stopped early")
    if progress.running:
        words.append(f"{len(progress.running)} running")
    if progress.waiting:
        words.append(f"waiting: {progress.waiting}")
    return ", ".join(words)


def trial_line(trial: Trial, search: Search, total: int) -> str:
    """One line about a trial that has ended."""
    fields = " ".join(f"{name}={text}" for name, text in trial.fields.items())
    what = f"failed: {trial.reason}" if trial.value is None else f"{search.metric} {trial.value:.6g}"
    return f"trial {trial.number} of {total}: {fields}: {what}"


def command(study: Study, trial: Trial) -> str:
    """The command that trains with a trial's fields, ready to paste."""
    search = study.search
    fields = {**search.given, **trial.fields}
    plan = fields.pop(PLAN) if PLAN in search.space else search.plan
    words = ["grappe", "train", search.task, *(f"{name}={text}" for name, text in fields.items())]
    return shlex.join([*words, *(["--plan", plan] if plan else [])])


def seconds_of(study: Study, trials: Sequence[Trial]) -> dict[int, float]:
    """Returns the seconds that the trainings took, all starts together, by number."""
    found = {}
    for trial in trials:
        try:
            used = Run(study.run_folder(trial.number)).read_description().get("used")
        except RunError:
            continue
        if isinstance(used, dict) and isinstance(took := used.get("seconds"), int | float):
            found[trial.number] = float(took)
    return found
