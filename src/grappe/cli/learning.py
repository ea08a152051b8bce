"""Defines the commands that find how to learn faster: lr-find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from grappe.cli.arguments import DataFolder, FieldText, PlanText, TaskName
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.launch.terminal import say
from grappe.words import plain_table

if TYPE_CHECKING:
    from grappe.verbs.lr_find.lr_find import LearningRates


def register(app: App) -> None:
    """Adds the commands to `app`."""
    app.command(lr_find)


def lr_find(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    ramp: Annotated[
        Literal["exponential", "linear"],
        Parameter(help="How the learning rate rises: by a factor at each step, or by an amount."),
    ] = "exponential",
    lowest: Annotated[
        float | None, Parameter(help="The first learning rate. Default: a thousandth of the task's own.")
    ] = None,
    highest: Annotated[
        float | None, Parameter(help="The last. Default: a thousand times the task's own.")
    ] = None,
    steps: Annotated[int, Parameter(help="Optimizer steps of each training.")] = 100,
    seeds: Annotated[int, Parameter(help="Trainings, each with the next seed.")] = 3,
    out: Annotated[
        Path | None, Parameter(help="Write the curves to this JSON file, for grappe report.")
    ] = None,
    data: DataFolder = None,
) -> int:
    """Find a band of learning rates, from short trainings that are thrown away. Exit code 1 if there is none."""
    from grappe.cli.preflight import preflight
    from grappe.fields import split
    from grappe.launch.rank import rank_from_environment
    from grappe.verbs.lr_find.ramp import Ramp

    texts = split(fields)
    ramp_options = Ramp(kind=ramp, lowest=lowest, highest=highest, steps=steps, seeds=seeds)
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out={out}: there is no folder {out.parent}")
    preflight([plan], task, once=True)
    from grappe.verbs.lr_find.lr_find import lr_find as verb

    result = verb(task, plan, ramp=ramp_options, fields=texts, data=data)
    process = rank_from_environment()
    if process is None or process.rank == 0:
        if out is not None:
            out.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        _show(result)
    return EXIT_OK if result.advice.band is not None else EXIT_FAILURE


def _show(result: LearningRates) -> None:
    from grappe.verbs.lr_find.lr_find import plot

    for line in plot(result):
        say(line)
    band = result.advice.band
    table = plain_table("", "")
    if band is None:
        table.add_row("no suggestion", result.advice.reason)
    else:
        ended = ", where the ramp ended: give a larger --highest to see more" if band.reaches_the_end else ""
        table.add_row("steepest", f"{band.steepest:.2g}")
        table.add_row("largest stable", f"{band.largest_stable:.2g}{ended}")
        name = "lr=" if result.is_field else "the optimizer's learning rate: "
        table.add_row("suggested", f"{name}{band.suggested:.2g}  (the task's own: {result.own:.2g})")
    show(table)
