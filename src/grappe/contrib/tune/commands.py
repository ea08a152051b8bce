"""Defines grappe tune, and shows a study: a row for each trial, and the best fields, ready to paste."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from grappe.cli.application import OPTIONS, DataFolder, DryRun, Json, PlanText, app, preflight
from grappe.cli.exit import show, show_answer, show_json
from grappe.contrib.tune.space import PLAN, SearchOptions, Trial
from grappe.contrib.tune.study import Study, best_of, open_study
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.fields import Names, split  # noqa: F401 (cyclopts looks the inherited fields' types up here)
from grappe.launch.terminal import complain, say
from grappe.plan import as_plan
from grappe.sites.sbatch import GpuCounts, JobOptions, NodeCount  # noqa: F401 (likewise)
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.words import filled_table, format_number, plan_name

if TYPE_CHECKING:
    from rich.table import Table

    from grappe.contrib.tune.coordinator import Coordinator

DEFAULTS = Options()
SEARCH = SearchOptions()
TIME = "--job-time"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialJobOptions(JobOptions):
    """Options of each trial's Slurm job; their --time is called otherwise, as --time-limit is a training's."""

    time: Annotated[str | None, Parameter(name=TIME)] = None
    """Time limit of each trial's job: 90m, 3h, 1-00:00:00. Default: 1 h."""
    array: Annotated[Literal["array"] | None, Parameter(name="--jobs")] = None
    """array: all trials are tasks of one job array, --parallel at a time; random or grid. Default: a job each."""


NO_JOB = TrialJobOptions()
JOBS = Group("Trials as Slurm jobs, with --site")


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

        grappe tune digits lr=0.01..1:log batch_size=32,64 --parallel 2
        grappe tune digits lr=0.1,0.2 epochs=3 --sampler grid --study runs/digits-lr
        grappe tune digits lr=0.001..3:log epochs=9 --halving 3 --trials 27
        grappe tune digits seed=1,2,3 --sampler grid --site narval --jobs array --parallel 4
        grappe tune --study runs/digits-lr --dry-run   its table, also while it runs

    You may kill it at any moment: the same command, with --study, continues it.

    Args:
        task: A shipped task, path/to/file.py[:Name], or package.module:Name.
        fields: Fields to search: lr=0.01..1:log batch_size=32,64; words as 'rule=adam|sgd'; or for all trials:
            epochs=3.
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
        option = {"time": TIME, "array": "--jobs"}.get(changed[0], f"--{changed[0].strip('_').replace('_', '-')}")
        raise UsageError(f"{option} is of Slurm jobs: give --site too, for trials as jobs")
    texts = split(fields) if dry_run else preflight([plan], task, fields)
    from grappe.contrib.tune import tune as verb

    parsed, jobs = as_plan(plan), job if job.site else None
    if dry_run:
        _, _, definition = verb.checked_search(task, texts, parsed, search, options, jobs)
        facts = [
            ("task", definition.task),
            *definition.space.items(),
            *definition.fixed_fields.items(),
            ("plan", plan_name(definition.plan)),
            ("sampler", definition.sampler),
            ("objective", f"{'largest' if definition.maximize else 'smallest'} {definition.metric}"),
            ("trials", f"{definition.trials}, {definition.parallel} at a time"),
        ]
        show_answer(json, "search", facts, search=definition, trials=definition.trials, dry_run=True)
        return EXIT_OK

    searched, complete = verb.search(
        task, texts, parsed, search, study, runs=job.runs, data=data, options=options, jobs=jobs, watch=_Progress()
    )
    code = _show(searched.folder, as_json=json)
    if not complete:
        if job.site:
            complain("grappe: the trials' jobs continue without this command; grappe cancel RUN ends one")
        complain(f"grappe: stopped; the same command with --study {searched.folder} continues")
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
    show(_table(study, trials, best))
    if best is None or best.value is None:
        running = any(trial.state == "open" for trial in trials)
        say("no trial has a result yet" if running else "no trial has a result")
        return EXIT_FAILURE
    value = f"{study.search.metric} {format_number(best.value)}"
    say(f"best: trial {best.number}, {value}, {study.run_folder(best.number)}")
    fields = {**study.search.fixed_fields, **best.fields}
    plan = fields.pop(PLAN) if PLAN in study.search.space else study.search.plan
    words = ["grappe", "train", study.search.task, *(f"{name}={text}" for name, text in fields.items())]
    say(shlex.join([*words, *(["--plan", plan] if plan else [])]))
    return EXIT_OK


class _Progress:
    """Writes a line about each trial that has ended, and why nothing can be started."""

    def __init__(self) -> None:
        self._reported: set[int] | None = None
        self._waiting = ""

    def __call__(self, progress: Coordinator) -> None:
        metric = progress.study.search.metric
        ended = {trial.number: trial for trial in progress.trials if trial.state in ("complete", "failed")}
        if self._reported is None:
            self._reported = set(ended)
            running = len(progress.trainings.running)
            words = [f"{len(ended)} of {progress.total} trials ended", *([f"{running} running"] if running else [])]
            summary = ", ".join(words)
            complain(f"study {progress.study.folder}: {summary}")
        for number in sorted(ended.keys() - self._reported):
            trial = ended[number]
            fields = " ".join(f"{name}={text}" for name, text in trial.fields.items())
            result = f"failed: {trial.reason}" if trial.value is None else f"{metric} {format_number(trial.value)}"
            self._reported.add(number)
            complain(f"{len(self._reported)} of {progress.total}: trial {number}: {fields}: {result}")
        if progress.waiting != self._waiting:
            self._waiting = progress.waiting
            if self._waiting:
                complain(f"waiting: {self._waiting}")


def _table(study: Study, trials: Sequence[Trial], best: Trial | None) -> Table:
    """A row for each trial: its fields, the other scores of its last evaluation, and the seconds of all its starts."""
    names, metric, facts, rows = list(study.search.space), study.search.metric, [], list[list[str]]()
    for trial in trials:
        facts.append(cells := dict[str, str]())
        if Run.is_run(study.run_folder(trial.number)):
            run = Run(study.run_folder(trial.number))
            scores = run.last_record("evaluation").items()
            others = {
                name: value for name, value in scores if isinstance(value, float) and name not in (metric, "count")
            }
            cells |= {name: format_number(value) for name, value in others.items()}
            if isinstance(seconds := run.read_description().get("used", {}).get("seconds"), int | float):
                cells["time"] = f"{seconds:.1f} s"
    further = [
        name for name in dict.fromkeys(name for cells in facts for name in cells) if name not in (metric, "count")
    ]
    for trial, cells in zip(trials, facts, strict=True):
        value = format_number(trial.rungs[-1]) if trial.rungs and trial.state != "failed" else ""
        state = {
            "complete": "best" if trial is best else "",
            "failed": f"failed: {trial.reason}",
            "paused": f"stopped after {study.search.parts[len(trial.rungs) - 1]}",
        }.get(trial.state, trial.state)
        more = [cells.get(name, "") for name in further]
        rows.append([str(trial.number), value, *more, *(trial.fields[name] for name in names), state])
    return filled_table(("trial", metric, *further, *names, ""), rows)
