"""Defines grappe tune, and shows a study: a row for each trial, and the best fields, ready to paste."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from grappe.cli.application import OPTIONS, DataFolder, DryRun, Json, PlanText, app, preflight
from grappe.cli.exit import show, show_answer, show_json
from grappe.errors import EXIT_FAILURE, EXIT_OK, RunError, UsageError
from grappe.fields import (  # noqa: F401 (cyclopts looks the inherited fields' types up here)
    Names,
    split,
)
from grappe.launch.terminal import complain, say, waiting
from grappe.plan import as_plan
from grappe.sites.sbatch import GpuCounts, JobOptions, NodeCount  # noqa: F401 (likewise)
from grappe.training.options import Options
from grappe.verbs.tune.space import SearchOptions, Trial
from grappe.verbs.tune.study import Study, best_of, open_study
from grappe.words import filled_table, format_number, plan_name

if TYPE_CHECKING:
    from rich.table import Table

    from grappe.verbs.tune.coordinator import SearchProgress

DEFAULTS = Options()
SEARCH = SearchOptions()
TIME = "--job-time"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialJobOptions(JobOptions):
    """Options of each trial's Slurm job; their --time is called otherwise, as --time-limit is a training's."""

    time: Annotated[str | None, Parameter(name=TIME)] = None
    """Time limit of each trial's job: 90m, 3h, 1-00:00:00. Default: 1 h."""


NO_JOB = TrialJobOptions()
JOBS = Group("Trials as Slurm jobs, with --site")
LIVE_ROWS = 15


@app.command
def tune(
    task: str | None = None,
    /,
    *fields: str,
    search: Annotated[SearchOptions, OPTIONS] = SEARCH,
    plan: PlanText = "",
    study: Path | None = None,
    data: DataFolder = None,
    options: Annotated[Options, OPTIONS] = DEFAULTS,
    job: Annotated[TrialJobOptions, OPTIONS, Parameter(group=JOBS)] = NO_JOB,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Search a task's fields; each trial is an ordinary run. Exit code 1 if none has a result.

    Args:
        task: A shipped task, path/to/file.py[:Name], or package.module:Name.
        fields: What is searched: lr=0.01..1:log batch_size=32|64; or for all trials: epochs=3.
        study: The study's folder; an existing study is continued.
        dry_run: Show the search, or without a task the study of --study; train nothing.
    """
    if dry_run and study is not None and (task is None or study.exists()):
        return _show(study, as_json=json)
    if task is None:
        raise UsageError("which task? grappe tune TASK lr=0.01..1:log …, or grappe tune --study STUDY --dry-run")
    from grappe.launch.start import interrupted

    fields_of_job = (field for field in dataclasses.fields(job) if field.name != "runs")
    changed = [field.name for field in fields_of_job if getattr(job, field.name) != field.default]
    if job.site is None and changed:
        option = TIME if changed[0] == "time" else f"--{changed[0].strip('_').replace('_', '-')}"
        raise UsageError(f"{option} is of Slurm jobs: give --site too, for trials as jobs")
    texts = split(fields) if dry_run else preflight([plan], task, fields)
    from grappe.verbs.tune import tune as verb

    parsed, jobs = as_plan(plan), job if job.site else None
    if dry_run:
        checked = verb.checked_search(task, texts, parsed, search, options=options, jobs=jobs)
        definition = checked.definition
        facts = [
            ("task", definition.task),
            *definition.space.items(),
            *definition.fixed_fields.items(),
            ("plan", plan_name(definition.plan)),
            ("sampler", definition.sampler),
            ("objective", f"{'largest' if definition.maximize else 'smallest'} {definition.metric}"),
            ("trials", f"{checked.total}, {definition.parallel} at a time"),
        ]
        show_answer(json, "search", facts, search=definition, trials=checked.total, dry_run=True)
        return EXIT_OK

    with _watched() as watch:
        searched, complete = verb.search(
            task, texts, parsed, search, study, runs=job.runs, data=data, options=options, jobs=jobs, watch=watch
        )
    code = _show(searched.folder, as_json=json)
    if not complete:
        if job.site:
            complain("grappe: the trials' jobs go on without this command; grappe cancel RUN ends one")
        complain(f"grappe: stopped; the same command with --study {searched.folder} goes on")
        return interrupted()
    return code


def _show(folder: Path, *, as_json: bool) -> int:
    study = open_study(folder)
    trials = study.trials
    best = best_of(study.search, trials)
    if as_json:
        number = None if best is None else best.number
        show_json("study", folder=folder, search=study.search, trials=trials, best=number)
        return EXIT_FAILURE if best is None else EXIT_OK
    show(trial_table(study, trials, facts=_facts(study, trials)))
    if best is None or best.value is None:
        running = any(trial.state == "open" for trial in trials)
        say("no trial has a result yet" if running else "no trial has a result")
        return EXIT_FAILURE
    value = f"{study.search.metric} {format_number(best.value)}"
    say(f"best: trial {best.number}, {value}, {study.run_folder(best.number)}")
    say(train_command(study, best))
    return EXIT_OK


@contextmanager
def _watched() -> Iterator[Callable[[SearchProgress], None]]:
    """Context with what shows a study's progress on standard error: a live table on a terminal, else lines."""
    if not sys.stderr.isatty():
        yield _ProgressLines()
        return
    from rich.console import Group as Lines
    from rich.live import Live

    from grappe.launch.safe_console import SafeConsole

    waiting("")
    with Live(console=SafeConsole(sys.stderr), auto_refresh=False, transient=True) as live:

        def update(progress: SearchProgress) -> None:
            rows = trial_table(progress.study, progress.trials, progress.running, LIVE_ROWS)
            live.update(Lines(f"{progress.study.folder}: {summary(progress)}", rows), refresh=True)

        yield update


class _ProgressLines:
    """Writes a line about each trial that has ended."""

    def __init__(self) -> None:
        self._reported: set[int] | None = None
        self._waiting = ""

    def __call__(self, progress: SearchProgress) -> None:
        ended = {trial.number: trial for trial in progress.trials if trial.state in ("complete", "failed")}
        if self._reported is None:
            complain(f"study {progress.study.folder}: {summary(progress)}")
            self._reported = set(ended)
        for number in sorted(ended.keys() - self._reported):
            trial, metric = ended[number], progress.study.search.metric
            fields = " ".join(f"{name}={text}" for name, text in trial.fields.items())
            result = f"failed: {trial.reason}" if trial.value is None else f"{metric} {format_number(trial.value)}"
            self._reported.add(number)
            complain(f"{len(self._reported)} of {progress.total}: trial {number}: {fields}: {result}")
        if progress.waiting != self._waiting:
            self._waiting = progress.waiting
            if self._waiting:
                complain(f"waiting: {self._waiting}")


def trial_table(
    study: Study,
    trials: Sequence[Trial],
    running: frozenset[int] = frozenset(),
    most: int | None = None,
    facts: Mapping[int, Mapping[str, str]] | None = None,
) -> Table:
    """A row for each trial, of the last `most`; the best is marked.

    Args:
        facts: by number, further cells by their columns; None: there are none.
    """
    from grappe.verbs.tune.journal import rung_parts

    names, rows = list(study.search.space), list[list[str]]()
    further = list(dict.fromkeys(name for cells in (facts or {}).values() for name in cells))
    best = best_of(study.search, trials)
    for trial in trials[-most:] if most else trials:
        value = format_number(trial.rungs[-1]) if trial.rungs and trial.state != "failed" else ""
        what = trial.reason or trial.state
        if trial.number in running:
            what = "running"
        elif trial.state == "paused":
            what = f"stopped after {rung_parts(study.search)[len(trial.rungs) - 1]}"
        elif trial.state == "complete":
            what = "best" if trial is best else ""
        elif trial.state == "failed":
            what = f"failed: {trial.reason}"
        cells = (facts or {}).get(trial.number, {})
        more = [cells.get(name, "") for name in further]
        rows.append([str(trial.number), value, *more, *(trial.fields[name] for name in names), what])
    return filled_table(("trial", study.search.metric, *further, *names, ""), rows)


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


def train_command(study: Study, trial: Trial) -> str:
    """The command that trains with a trial's fields, ready to paste."""
    from grappe.verbs.tune.space import PLAN

    search = study.search
    fields = {**search.fixed_fields, **trial.fields}
    plan = fields.pop(PLAN) if PLAN in search.space else search.plan
    words = ["grappe", "train", search.task, *(f"{name}={text}" for name, text in fields.items())]
    return shlex.join([*words, *(["--plan", plan] if plan else [])])


def _facts(study: Study, trials: Sequence[Trial]) -> dict[int, dict[str, str]]:
    """Returns the other scores of each trial's last evaluation, and the seconds of all its starts, by number."""
    from grappe.training.run import Run

    facts = {}
    for trial in trials:
        cells = facts.setdefault(trial.number, dict[str, str]())
        try:
            run = Run(study.run_folder(trial.number))
            used = run.read_description().get("used")
        except RunError:
            continue
        last = run.last_record("evaluation")
        scores = {name: value for name, value in last.items() if isinstance(value, float) and name != "count"}
        cells |= {name: format_number(scores[name]) for name in scores if name != study.search.metric}
        if isinstance(used, dict) and isinstance(duration := used.get("seconds"), int | float):
            cells["time"] = f"{duration:.1f} s"
    return facts
