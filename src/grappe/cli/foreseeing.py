"""Defines the command that says before a training what it needs: foresee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    out: Annotated[
        Path | None, Parameter(help="With --history: write it all to this file, .json or .csv.")
    ] = None,
) -> int:
    """Say what plans need in memory, before any process of them starts. Exit code 1 if no plan fits the site."""
    if history:
        return _history(Path(task) if task is not None else RUNS, data, out)
    if task is None:
        raise UsageError(
            "give a task: grappe foresee digits; or --history, for the errors over the runs here"
        )
    from grappe.fields import split
    from grappe.verbs.foresee import table
    from grappe.verbs.foresee.foresee import foresee as verb
    from grappe.verbs.foresee.foresee import room_of

    texts = split(fields)
    room = None if site is None else room_of(site)
    found = verb(task, plan or (), gpus=gpus, batch_size=batch_size, site=site, fields=texts, data=data)
    show(table.table(found, room))
    for line in table.sentences(found, room):
        show(line)
    known = [one for one in found if one.needs is not None]
    return EXIT_FAILURE if all(one.fits is False for one in known) else EXIT_OK


def _history(folder: Path, data: Path | None, out: Path | None) -> int:
    from grappe.verbs.foresee import history_table
    from grappe.verbs.foresee.history import errors, history

    found = history(folder, data)
    summed = errors(found)
    if out is not None:
        history_table.write(found, summed, out)
    show(history_table.table(found))
    for line in history_table.sentences(found, summed):
        show(line)
    return EXIT_OK
