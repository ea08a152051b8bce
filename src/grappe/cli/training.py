"""Defines grappe train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.cli.arguments import (
    OPTIONS,
    SWITCH,
    DataFolder,
    FieldText,
    PlanText,
    TaskName,
)
from grappe.cli.exit import show
from grappe.errors import EXIT_OK
from grappe.fields import split
from grappe.training.options import Options

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
    with_optimizer: Annotated[
        bool,
        SWITCH,
        Parameter(help="Take the optimizer's state and the number of epochs done from the --from file, too."),
    ] = False,
    epochs_done: Annotated[
        int | None,
        Parameter(
            help="Epochs that the training of --from has done: begin behind them. Default: what the file says."
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
        with_optimizer=with_optimizer,
        epochs_done=epochs_done,
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
