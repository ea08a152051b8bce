"""Defines the command that says before a training what it needs, in memory and time: foresee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from grappe.cli.arguments import DataFolder, FieldText
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.fields import Counts
from grappe.launch.folders import RUNS


def register(app: App) -> None:
    """Adds the command to `app`."""
    app.command(foresee)


def foresee(
    task: Annotated[
        str | None,
        Parameter(
            help="A shipped task, path/to/file.py[:Name], or package.module:Name; with --history the folder of runs."
        ),
    ] = None,
    /,
    *fields: FieldText,
    plan: Annotated[
        list[str] | None,
        Parameter(negative="", help="A plan; repeatable. Default: plans that train the same, on --gpus."),
    ] = None,
    site: Annotated[
        str | None, Parameter(help="Compare with the memory of this cluster's GPUs (see: grappe sites).")
    ] = None,
    gpus: Annotated[
        Counts, Parameter(help="Without --plan: numbers of processes to try: 1,2,8. Default: 1,2,4,8.")
    ] = (),
    batch_size: Annotated[
        Counts, Parameter(help="Samples per step over all processes: 64,256. Default: the task's.")
    ] = (),
    data: DataFolder = None,
    history: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Compare what is foreseen with what the runs in a folder (default: runs) have measured.",
        ),
    ] = False,
    aim: Annotated[
        Literal["fastest", "cheapest", "smallest"],
        Parameter(help="What makes a plan the best: its time, its core-hours or GPU-hours, or its memory."),
    ] = "fastest",
    out: Annotated[
        Path | None, Parameter(help="Write it all to this file, .json; with --history also .csv.")
    ] = None,
) -> int:
    """Say what plans need in memory and time, before any process of them starts.

    Exit code 1 if no plan fits the site, 2 if none can be foreseen or what is given is wrong.
    """
    if history:
        return _history(Path(task) if task is not None else RUNS, data, out)
    if task is None:
        raise UsageError(
            "give a task: grappe foresee digits; or --history, for the errors over the runs here"
        )
    from grappe.fields import split
    from grappe.verbs.foresee import table, time_table
    from grappe.verbs.foresee.foresee import foresee as verb
    from grappe.verbs.foresee.foresee import room_of
    from grappe.verbs.foresee.out import check_out

    if out is not None:
        check_out(out)
    texts = split(fields)
    room = None if site is None else room_of(site)
    times = verb(task, plan or (), gpus=gpus, batch_size=batch_size, site=site, fields=texts, data=data)
    if out is not None:
        time_table.write(times, out)
    forecasts = [timed.foreseen for timed in times.plans]
    show(table.table(forecasts, room))
    for line in table.sentences(forecasts, room):
        show(line)
    if (made := time_table.table(times)) is not None:
        show("")
        show(made)
    for line in time_table.sentences(times, aim):
        show(line)
    predicted = [forecast for forecast in forecasts if forecast.needs is not None]
    return EXIT_FAILURE if all(forecast.fits is False for forecast in predicted) else EXIT_OK


def _history(folder: Path, data: Path | None, out: Path | None) -> int:
    from grappe.verbs.foresee import history_table
    from grappe.verbs.foresee.history import errors, history
    from grappe.verbs.foresee.out import check_out

    if out is not None:
        check_out(out, history=True)
    comparisons = history(folder, data)
    summed = errors(comparisons)
    if out is not None:
        history_table.write(comparisons, summed, out)
    show(history_table.table(comparisons))
    for line in history_table.sentences(comparisons, summed):
        show(line)
    return EXIT_OK
