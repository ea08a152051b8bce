"""Defines grappe tune."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Group, Parameter

from grappe.cli.arguments import OPTIONS, DataFolder, PlanText
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.launch.terminal import complain, say
from grappe.training.options import Options
from grappe.verbs.submission import JobOptions

if TYPE_CHECKING:
    from grappe.verbs.tune.coordinator import SearchProgress

DEFAULTS = Options()
NO_JOB = JobOptions()
JOBS = Group("Trials as Slurm jobs, with --site")


def register(app: App) -> None:
    """Adds the command to `app`."""
    app.command(tune)


def tune(
    task: Annotated[
        str | None, Parameter(help="A shipped task, path/to/file.py[:Name], or package.module:Name.")
    ] = None,
    /,
    *fields: Annotated[
        str, Parameter(help="What is searched: lr=0.01..1:log batch_size=32|64; or for all trials: epochs=3.")
    ],
    trials: Annotated[int | None, Parameter(help="Trials in all. Default: 20; of a grid all.")] = None,
    parallel: Annotated[int, Parameter(help="Trials that are trained at a time; as jobs: in the queue.")] = 1,
    plan: PlanText = "",
    study: Annotated[
        Path | None, Parameter(help="The study's folder; if there is a study, it goes on.")
    ] = None,
    metric: Annotated[
        str, Parameter(help="The objective, at a training's last evaluation: loss, or a metric of the task.")
    ] = "loss",
    maximize: Annotated[
        bool | None,
        Parameter(negative="--minimize", help="Which way the metric is better. Default: the loss is low."),
    ] = None,
    sampler: Annotated[
        Literal["tpe", "random", "grid"],
        Parameter(help="tpe: by what earlier trials came to (Optuna's); random; grid: all combinations."),
    ] = "tpe",
    halving: Annotated[
        int | None,
        Parameter(
            help="Successive halving (ASHA): trials are first trained in part, and of 3, say, the best goes on."
        ),
    ] = None,
    rungs: Annotated[
        int | None,
        Parameter(
            help="How often a training stops to be compared, its end included. Default: 3, with --halving."
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Of the sampler; the task's own seed is a field.")] = 0,
    data: DataFolder = None,
    options: Annotated[Options, OPTIONS, Parameter(negative="")] = DEFAULTS,
    job: Annotated[JobOptions, OPTIONS, Parameter(group=JOBS)] = NO_JOB,
    show_: Annotated[
        Path | None, Parameter(name="--show", help="Show this study, and train nothing.")
    ] = None,
) -> int:
    """Search a task's fields; each trial is an ordinary run. Exit code 1 if none has a result."""
    if show_ is not None:
        if task is not None:
            raise UsageError("--show shows a study and trains nothing: leave the task out, or --show")
        return _show(show_)
    if task is None:
        raise UsageError("which task? grappe tune TASK lr=0.01..1:log …, or grappe tune --show STUDY")
    from grappe.cli.preflight import preflight
    from grappe.fields import split
    from grappe.launch.exit import interrupted
    from grappe.verbs.tune.tune import Wanted

    if job.site is None and job != NO_JOB:
        option = next(
            field.name for field in dataclasses.fields(job) if getattr(job, field.name) != field.default
        )
        raise UsageError(
            f"--{option.strip('_').replace('_', '-')} is of Slurm jobs: give --site too, for trials as jobs"
        )
    texts = split(fields)
    direction = None if maximize is None else "maximize" if maximize else "minimize"
    search_options = Wanted(
        metric=metric,
        direction=direction,
        sampler=sampler,
        seed=seed,
        trials=trials,
        parallel=parallel,
        halving=halving,
        rungs=rungs,
    )
    preflight([plan], task)
    from grappe.plan import as_plan
    from grappe.verbs.tune.tune import search

    with _watched() as watch:
        searched, complete = search(
            task,
            texts,
            as_plan(plan),
            search_options,
            study,
            data=data,
            options=options,
            jobs=job if job.site else None,
            watch=watch,
        )
    code = _show(searched.folder)
    if not complete:
        if job.site:
            complain("grappe: the trials' jobs go on without this command; grappe cancel RUN ends one")
        complain(f"grappe: stopped; the same command with --study {searched.folder} goes on")
        return interrupted()
    return code


def _show(folder: Path) -> int:
    from grappe.verbs.tune.study import best_of, open_study
    from grappe.verbs.tune.table import command, seconds_of, table

    study = open_study(folder)
    trials = study.trials
    best = best_of(study.search, trials)
    show(table(study, trials, seconds=seconds_of(study, trials)))
    if best is None:
        say(
            "no trial has a result yet"
            if any(trial.state == "open" for trial in trials)
            else "no trial has a result"
        )
        return EXIT_FAILURE
    say(f"best: trial {best.number}, {study.search.metric} {best.value:.6g}, {study.run_folder(best.number)}")
    say(command(study, best))
    return EXIT_OK


@contextmanager
def _watched() -> Iterator[Callable[[SearchProgress], None]]:
    """Context with what shows a study's progress on standard error: a live table on a terminal, else lines."""
    from grappe.launch.safe_console import SafeConsole

    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.live import Live

    with Live(console=SafeConsole(sys.stderr), auto_refresh=False, transient=True) as live:
        from rich.console import Group

        from grappe.verbs.tune.table import LIVE_ROWS, summary, table

        def update(progress: SearchProgress) -> None:
            rows = table(progress.study, progress.trials, progress.running, LIVE_ROWS)
            live.update(Group(f"{progress.study.folder}: {summary(progress)}", rows), refresh=True)

        yield update


class _Lines:
    """Writes a line about each trial that has ended."""

    def __init__(self) -> None:
        self._said: set[int] | None = None
        self._waiting = ""

    def __call__(self, progress: SearchProgress) -> None:
        from grappe.verbs.tune.table import summary, trial_line

        ended = {trial.number: trial for trial in progress.trials if trial.state in ("complete", "failed")}
        if self._said is None:
            complain(f"study {progress.study.folder}: {summary(progress)}")
            self._said = set(ended)
        for number in sorted(ended.keys() - self._said):
            complain(trial_line(ended[number], progress.study.search, progress.total))
        self._said |= ended.keys()
        if progress.waiting != self._waiting:
            self._waiting = progress.waiting
            if self._waiting:
                complain(f"waiting: {self._waiting}")
