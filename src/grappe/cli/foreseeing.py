"""Defines the command that says before a training what it needs, in memory and time: foresee."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from grappe.cli.arguments import DataFolder, FieldText
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK
from grappe.fields import Counts

if TYPE_CHECKING:
    from grappe.foresight.search import Foreseen


def register(app: App) -> None:
    """Adds the command to `app`."""
    app.command(foresee)


def foresee(
    task: Annotated[
        str,
        Parameter(help="A shipped task, path/to/file.py[:Name], or package.module:Name."),
    ],
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
    aim: Annotated[
        Literal["fastest", "cheapest", "smallest"],
        Parameter(help="What makes a plan the best: its time, its core-hours or GPU-hours, or its memory."),
    ] = "fastest",
    no_times: Annotated[
        bool, Parameter(negative="", show_default=False, help="Memory alone: no steps are run.")
    ] = False,
    out: Annotated[Path | None, Parameter(help="Write it all to this file, .json.")] = None,
) -> int:
    """Say what plans need in memory before any process of them starts, and how long a step of them takes.

    Exit code 1 if no plan fits the site, 2 if none can be foreseen or what is given is wrong.
    """
    from grappe.fields import split
    from grappe.verbs.foresee import tables
    from grappe.verbs.foresee.foresee import budget_of
    from grappe.verbs.foresee.foresee import foresee as verb

    if out is not None:
        tables.check_out(out)
    budget = None if site is None else budget_of(site)

    def show_memory(foreseen: Sequence[Foreseen]) -> None:
        show(tables.memory_table(foreseen, budget))
        for line in tables.memory_sentences(foreseen, budget):
            show(line)

    foresight = verb(
        task,
        plan or (),
        gpus=gpus,
        batch_size=batch_size,
        site=site,
        fields=split(fields),
        data=data,
        times=not no_times,
        on_memory=show_memory,
    )
    if out is not None:
        tables.write(foresight, out)
    if (table := tables.time_table(foresight)) is not None:
        show("")
        show(table)
    for line in tables.time_sentences(foresight, aim):
        show(line)
    fits = [timed.foreseen.fits for timed in foresight.plans if timed.foreseen.needs is not None]
    return EXIT_FAILURE if all(answer is False for answer in fits) else EXIT_OK
