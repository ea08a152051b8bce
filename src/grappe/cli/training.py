"""Defines grappe train, and reads its command line for commands that submit a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from grappe.cli.arguments import (
    OPTIONS,
    SWITCH,
    DataFolder,
    FieldText,
    PlanText,
    TaskName,
    read_text_forms,
)
from grappe.cli.exit import show, usage_error
from grappe.errors import EXIT_OK, UsageError
from grappe.fields import split
from grappe.training.options import Options
from grappe.verbs.submission import JobOptions, Submission

DEFAULTS = Options()


def train(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    run: Annotated[Path | None, Parameter(help="The run's folder; if there is a run, it is resumed.")] = None,
    data: DataFolder = None,
    from_: Annotated[
        Path | None,
        Parameter(
            name="--from",
            help="Initial weights: a run, or a .safetensors, .ckpt or .pt file (as weights only).",
        ),
    ] = None,
    watch: Annotated[
        list[str] | None,
        Parameter(
            negative="", help="A watcher (callback) of your own: file.py:Class or module:Class. Repeatable."
        ),
    ] = None,
    options: Annotated[Options, OPTIONS, Parameter(negative="")] = DEFAULTS,
    smoke: Annotated[
        bool, SWITCH, Parameter(help="Test one step, evaluation, save and resume under this plan.")
    ] = False,
) -> int:
    """Train a task under a plan, or resume a run."""
    from grappe.cli.preflight import preflight
    from grappe.launch.exit import interrupted

    texts = split(fields)
    preflight([plan], task, run, once=not smoke)
    from grappe.plan import as_plan
    from grappe.training.request import Request, checked_watchers, data_folder
    from grappe.training.task_reference import TaskReference
    from grappe.verbs import train as verb

    request = Request(
        task=TaskReference.of(task, texts),
        plan=as_plan(plan),
        run=run,
        data=data_folder(data),
        weights=from_,
        options=options,
        watchers=checked_watchers(watch or ()),
    )
    if smoke:
        from grappe.verbs.smoke import smoke as check

        show(check(request))
        return EXIT_OK
    result = verb.run_training(request)
    if result.status == "finished before":
        show(f"{result.run} is finished (step {result.step}): nothing to do")
    return interrupted() if result.status == "interrupted" else EXIT_OK


def read_submission(words: Sequence[str], job: JobOptions) -> Submission:
    """Reads `train TASK …` as a submission, with the definitions of grappe train.

    Raises:
        UsageError: the words are no `train` command, or an option is unknown or wrong.
    """
    if not words or words[0] != "train":
        raise UsageError(
            f"grappe submit runs a training{f', not {words[0]!r}' if words else ''}: "
            "grappe submit --time 3h -- train TASK …"
        )
    app = App(config=read_text_forms)
    app.command(train)
    try:
        _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise usage_error(error) from error
    found = bound.arguments
    data = found.get("data")
    return Submission(
        task=found["task"],
        arguments=tuple(words[1:]),
        plan=found.get("plan", ""),
        fields=tuple(found.get("fields", ())),
        run=found.get("run"),
        data=str(data) if data is not None else None,
        job=job,
    )
