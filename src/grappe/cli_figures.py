"""Figures: the commands that measure and show: measure, report, follow, curves."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from grappe.entry import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.parameters import SWITCH, DataFolder, FieldText, RunFolder, TaskName, whole_numbers

if TYPE_CHECKING:
    from grappe.verbs.measure_jobs import Wanted


def register(app: App) -> None:
    """Adds them to the command line."""
    for command in (measure, report, follow, curves):
        app.command(command)


def measure(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: Annotated[
        list[str] | None,
        Parameter(help="A plan to measure; once for each. The first is what the others are compared with."),
    ] = None,
    steps: Annotated[int, Parameter(help="Timed steps of each training, after 5 that warm up.")] = 30,
    repeats: Annotated[int, Parameter(help="Trainings of each plan, by turns.")] = 3,
    batch_size: Annotated[
        str, Parameter(show_default=False, help="Samples a step over all processes: 64, or 32,64,128.")
    ] = "",
    weak: Annotated[
        bool, SWITCH, Parameter(help="Batch sizes are for one process and grow with their number.")
    ] = False,
    no_advice: Annotated[bool, SWITCH, Parameter(help="Do not try what the first figures suggest.")] = False,
    site: Annotated[
        str | None, Parameter(help="Submit each training as a Slurm job of this cluster (see: grappe sites).")
    ] = None,
    account: Annotated[str | None, Parameter(help="What such jobs are billed to.")] = None,
    time: Annotated[str | None, Parameter(help="How long such a job may take: 30m. Default: 1 h.")] = None,
    show_: Annotated[
        bool,
        Parameter(name="--show", negative="", show_default=False, help="Print the jobs; submit nothing."),
    ] = False,
    gather: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, help="Train nothing: take these runs, of such jobs say."),
    ] = None,
    largest_batch: Annotated[
        bool, SWITCH, Parameter(help="Find the largest batch that fits, too, under each plan.")
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="Write the figures to this JSON file, for grappe report.")
    ] = None,
    data: DataFolder = None,
) -> int:
    """Measure what plans cost and how they scale: speed, memory, energy, and what is lost where."""
    from grappe.fields import split
    from grappe.verbs import session

    texts = split(fields)
    sizes = whole_numbers("--batch-size", batch_size)
    if site is not None:
        from grappe.verbs.measure_jobs import Wanted

        if largest_batch:
            raise UsageError("--largest-batch looks on this machine: leave it out with --site")
        later = ("--weak",) * weak + (("--out", str(out)) if out else ())
        return _send(
            Wanted(
                task=task,
                fields=fields,
                plans=tuple(plan or [""]),
                steps=steps,
                repeats=repeats,
                batch_sizes=tuple(sizes),
                weak=weak,
                site=site,
                account=account,
                time=time,
                data=str(data) if data else None,
            ),
            show_,
            later,
        )
    if not gather:
        session.prepare(plan or [""], task)
    from grappe.verbs import measure as verb
    from grappe.verbs import measured, verdict
    from grappe.verbs.largest import largest_batches as verb_largest
    from grappe.verbs.measure_jobs import gather as gathered

    points = (
        gathered(gather)
        if gather
        else verb.measure(
            task,
            plan or [""],
            steps=steps,
            repeats=repeats,
            batch_sizes=sizes,
            weak=weak,
            advise=not no_advice,
            data=data,
            fields=texts,
            told=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    for part in (
        measured.table(points),
        "",
        measured.losses(points),
        *measured.notes(points),
        *verdict.sentences(points),
    ):
        if part is not None:
            show(part)
    if largest_batch:
        for found in verb_largest(task, plan or [""], data, texts):
            show(str(found))
    if out is not None:
        measured.write(points, task, out, weak=weak)
    return EXIT_FAILURE if any(point.failure for point in points) else EXIT_OK


def _send(wanted: Wanted, only_show: bool, later: Sequence[str]) -> int:
    """Submits trainings as jobs, and says how to gather them."""
    from grappe.verbs.measure_jobs import send

    runs = []
    for one in send(wanted, show=only_show):
        if only_show:
            sys.stdout.write(one.text)
        else:
            show(f"job {one.job}: {one.cost}; run {one.run}")
        runs.append(str(one.run))
    if not only_show:
        show(f"once they have ended: grappe measure {wanted.task} --gather {shlex.join([*runs, *later])}")
    return EXIT_OK


def report(
    *places: Annotated[Path, Parameter(help="Runs' folders, or files of grappe measure --out.")],
    out: Annotated[
        Path | None, Parameter(help="The file. Default: report.html, in the run's folder if there is one.")
    ] = None,
) -> int:
    """Write one HTML file that opens offline: curves, time, memory, scaling, configuration."""
    from grappe.verbs.report import report as verb

    show(str(verb(places, out)))
    return EXIT_OK


def follow(run: RunFolder, /) -> int:
    """Watch a run as it goes, until it ends; Ctrl-C leaves it alone."""
    from grappe.verbs.follow import follow as verb

    verb(run, sys.stdout)
    return EXIT_OK


def curves(
    *runs: Annotated[Path, Parameter(help="Runs' folders: runs/… (see: grappe runs)")],
    out: Annotated[Path | None, Parameter(help="A file. Default: the standard output.")] = None,
) -> int:
    """Print the curves of runs as CSV: a line a step, a line an evaluation."""
    from grappe.verbs.curves import write_csv

    if not runs:
        raise UsageError("no run given: grappe runs lists them")
    with contextlib.ExitStack() as stack:
        write_csv(runs, sys.stdout if out is None else stack.enter_context(out.open("w")))
    return EXIT_OK
