"""Defines the commands that measure and show: measure, report, follow, curves."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from grappe.cli.arguments import OPTIONS, SWITCH, DataFolder, FieldText, RunFolder, TaskName
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.launch.terminal import complain, say
from grappe.verbs.measure.options import MeasureOptions
from grappe.verbs.submit.submission import JobOptions

if TYPE_CHECKING:
    from grappe.verbs.measure.jobs import JobRequest

DEFAULTS = MeasureOptions()


def register(app: App) -> None:
    """Adds the commands to `app`."""
    for command in (measure, report, follow, curves):
        app.command(command)


def measure(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="A plan to measure; repeatable. The first is the baseline.",
        ),
    ] = None,
    options: Annotated[MeasureOptions, OPTIONS, Parameter(negative="")] = DEFAULTS,
    no_advice: Annotated[
        bool, SWITCH, Parameter(help="Do not measure plans that the first figures suggest.")
    ] = False,
    site: Annotated[
        str | None, Parameter(help="Submit each training as a Slurm job of this cluster (see: grappe sites).")
    ] = None,
    account: Annotated[str | None, Parameter(help="Account to bill for such jobs.")] = None,
    time: Annotated[str | None, Parameter(help="Time limit of such a job: 30m. Default: 1 h.")] = None,
    show_: Annotated[
        bool,
        Parameter(name="--show", negative="", show_default=False, help="Print the jobs; submit nothing."),
    ] = False,
    gather: Annotated[
        list[Path] | None,
        Parameter(
            negative="",
            consume_multiple=True,
            help="Train nothing: read these runs, for example those of such jobs.",
        ),
    ] = None,
    largest_batch: Annotated[
        bool, SWITCH, Parameter(help="Find the largest batch that fits, too, under each plan.")
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="Write the figures to this JSON file, for grappe report.")
    ] = None,
    data: DataFolder = None,
) -> int:
    """Measure plans and how they scale: speed, memory, energy, and where efficiency is lost."""
    from grappe.cli.preflight import preflight
    from grappe.fields import split

    texts = split(fields)
    plans = plan or [""]
    if options.why and (site is not None or gather):
        raise UsageError("--why traces steps on this machine: leave out --site and --gather")
    if (options.evaluate_every or options.save_every) and not options.why:
        raise UsageError("--evaluate-every and --save-every are for --why: add it, or leave them out")
    if site is not None:
        from grappe.verbs.measure.jobs import JobRequest

        if largest_batch:
            raise UsageError("--largest-batch measures on this machine: leave it out with --site")
        return _send(
            JobRequest(
                task=task,
                fields=fields,
                plans=tuple(plans),
                options=options,
                job=JobOptions(site=site, account=account, time=time),
                data=str(data) if data else None,
            ),
            show_,
            ("--weak",) * options.weak + (("--out", str(out)) if out else ()),
        )
    if not gather:
        preflight(plans, task)
    from grappe.verbs.measure import measure as verb
    from grappe.verbs.measure import table, verdict
    from grappe.verbs.measure.explain import explain
    from grappe.verbs.measure.jobs import gather as gathered
    from grappe.verbs.measure.largest import largest_batches as verb_largest

    points = (
        gathered(gather)
        if gather
        else verb.measure(
            task,
            plans,
            options=options,
            advise=not no_advice,
            data=data,
            fields=texts,
            note=complain,
        )
    )
    for part in (
        table.table(points),
        "",
        table.losses(points),
        *table.notes(points),
        *verdict.sentences(points),
    ):
        if part is not None:
            show(part)
    explanations = (
        explain(task, points, options=options, data=data, fields=texts, note=complain) if options.why else []
    )
    for shown in table.explained(explanations):
        show(shown)
    if largest_batch:
        for largest in verb_largest(task, plans, data, texts):
            show(str(largest))
    if out is not None:
        table.write(points, task, out, weak=options.weak, explanations=explanations)
    return EXIT_FAILURE if any(point.failure for point in points) else EXIT_OK


def _send(request: JobRequest, only_show: bool, later: Sequence[str]) -> int:
    """Submits trainings as jobs, and prints the command that gathers their results."""
    from grappe.verbs.measure.jobs import send

    runs = []
    for submitted in send(request, show=only_show):
        if only_show:
            say(submitted.text, end="")
        else:
            show(f"job {submitted.job}: {submitted.cost}; run {submitted.run}")
        runs.append(str(submitted.run))
    if not only_show:
        show(f"once they have ended: grappe measure {request.task} --gather {shlex.join([*runs, *later])}")
    return EXIT_OK


def report(
    *places: Annotated[Path, Parameter(help="Runs' or studies' folders, or files of grappe measure --out.")],
    out: Annotated[
        Path | None, Parameter(help="The file. Default: report.html, in the run's folder if there is one.")
    ] = None,
) -> int:
    """Write one HTML file that opens offline: curves, time, memory, scaling, configuration."""
    from grappe.verbs.report.report import report as verb

    show(str(verb(places, out)))
    return EXIT_OK


def follow(run: RunFolder, /) -> int:
    """Watch a run until it ends; Ctrl-C does not disturb the run."""
    from grappe.verbs.follow import follow as verb

    verb(run, sys.stdout)
    return EXIT_OK


def curves(
    *runs: Annotated[Path, Parameter(help="Runs' folders: runs/… (see: grappe runs)")],
    out: Annotated[Path | None, Parameter(help="A file. Default: the standard output.")] = None,
) -> int:
    """Print the curves of runs as CSV: one line per step, one line per evaluation."""
    from grappe.verbs.curves import write_csv

    if not runs:
        raise UsageError("no run given: grappe runs lists them")
    with contextlib.ExitStack() as stack:
        write_csv(runs, sys.stdout if out is None else stack.enter_context(out.open("w")))
    return EXIT_OK
