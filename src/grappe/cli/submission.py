"""Reads the command that follows `grappe submit … --` by the definitions of grappe's own commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError

from grappe.cli.exit import usage_error
from grappe.errors import UsageError
from grappe.training.options import Options
from grappe.verbs.submit.submission import SCRIPT, TRAIN, TUNE, JobOptions, Submission
from grappe.verbs.tune.study import SearchOptions

NOT_IN_JOBS = ("fetch", "submit", "queue", "logs", "wait", "cancel", "sites")
LAUNCHERS = ("torchrun", "srun", "mpirun", "mpiexec", "horovodrun", "deepspeed", "accelerate", "lightning")
USAGE = "grappe submit --time 3h -- train TASK …, another command of grappe, or -- my_script.py ARGUMENTS"


def read_submission(words: Sequence[str], job: JobOptions, app: App) -> Submission:
    """Reads the submission of a command of grappe, or of a Python script.

    Args:
        app: the application with all its commands.

    Raises:
        UsageError: the words are neither, or an option is unknown or wrong.
    """
    words = list(words)
    if words and words[0] == "grappe":
        words = words[1:]
    elif words and words[0] in ("python", "python3"):
        words = words[1:]
        if not words or not words[0].endswith(".py"):
            raise UsageError(f"python is followed by a script, my_script.py: {USAGE}")
    if not words:
        raise UsageError(f"what shall the job do? {USAGE}")
    if words[0].endswith(".py"):
        return _script(words, job)
    if words[0] in LAUNCHERS:
        raise UsageError(
            f"the job starts the processes itself, so leave {words[0]} out: "
            "grappe submit --processes 4 -- my_script.py ARGUMENTS"
        )
    if words[0] in NOT_IN_JOBS:
        raise UsageError(f"grappe {words[0]} is for the login node, and runs in no job: {USAGE}")
    return _command(words, job, app)


def _script(words: list[str], job: JobOptions) -> Submission:
    if not Path(words[0]).is_file():
        raise UsageError(f"there is no script {words[0]}: is the path right, seen from {Path.cwd()}?")
    return Submission(command=SCRIPT, script=Path(words[0]), arguments=tuple(words), job=job)


def _command(words: list[str], job: JobOptions, app: App) -> Submission:
    if words[0] not in app:
        raise UsageError(f"grappe has no command {words[0]!r}: {USAGE}")
    try:
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise usage_error(error) from error
    values: dict[str, Any] = bound.arguments
    plans = values.get("plan") or ""
    data, options = values.get("data"), values.get("options")
    search: SearchOptions = values.get("search") or SearchOptions()
    if words[0] == TUNE and getattr(values.get("job"), "site", None) is not None:
        raise UsageError(
            "grappe tune --site submits a job for each trial, and itself runs on the login node: leave submit out"
        )
    if words[0] == TUNE and (values.get("task") is None or values.get("show_") is not None):
        raise UsageError(
            "grappe tune --show reads a study and needs no job; a search names its task: tune TASK …"
        )
    return Submission(
        command=words[0],
        task=values.get("task"),
        arguments=tuple(words[1:]),
        plans=(plans,) if isinstance(plans, str) else tuple(plans),
        fields=tuple(values.get("fields", ())),
        run=values.get("run"),
        epochs_done=values.get("epochs_done") or 0,
        data=str(data) if data is not None else None,
        parallel=search.parallel,
        sampler=search.sampler if words[0] == TUNE else "",
        study=values.get("study"),
        loggers=tuple(getattr(options, "log", ())),
        options=options if words[0] == TRAIN and options is not None else Options(),
        job=job,
    )
