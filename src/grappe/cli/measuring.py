"""Defines the commands that predict, measure and show: foresee, measure, verify, report, follow, curves."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from grappe import extensions
from grappe.cli import completion, output
from grappe.cli.application import (
    OPTIONS,
    DataFolder,
    DryRun,
    FieldText,
    Json,
    OutFile,
    Plans,
    RunFolder,
    TaskName,
    app,
    preflight,
)  # fmt: skip
from grappe.cli.exit import show, show_json
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.fields import Counts, split, whole_numbers
from grappe.language import translated_name
from grappe.launch.files import RUNS
from grappe.launch.terminal import complain, progress, say, waiting
from grappe.verbs.measure.points import MeasureOptions
from grappe.words import count_of, filled_table, plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from grappe.verbs.measure.points import Measurement
    from grappe.verbs.verify.verify import PlanVerdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(MeasureOptions):
    """The options on the command line, where the field batch_size=32,64 gives the batch sizes."""

    batch_size: Annotated[Counts, Parameter(parse=False)] = ()


DEFAULTS = _Options()
ScriptWords = Annotated[
    list[str],
    Parameter(
        help="A training script for one process and its arguments, in place of a task; the last option. The plans are "
        "those of grappe launch.",
        consume_multiple=True,
        allow_leading_hyphen=True,
    ),
]


@app.command
def foresee(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: Plans = None,
    site: Annotated[str | None, Parameter(completer=completion.sites)] = None,
    gpus: Counts = (),
    data: DataFolder = None,
    aim: Literal["fastest", "cheapest", "smallest"] = "fastest",
    no_times: bool = False,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    out: OutFile = None,
    json: Json = False,
) -> int:
    """Predict the memory that plans need and how long a step takes, before anything starts.

    Exit code 1 if no plan fits the site, 2 if none can be predicted or an argument is wrong.

    Args:
        plan: A plan; repeatable. Default: plans that train the same, on --gpus.
        site: Compare with the memory of this cluster's GPUs (see: grappe sites).
        gpus: Without --plan: numbers of processes to try: 1,2,8. Default: 1,2,4,8.
        aim: Criterion of the best plan: its time, its core-hours or GPU-hours, or its memory.
        no_times: Memory alone: no steps are run.
        all_: All plans, and the parts of memory and time.
        out: Write it all to this file, .json.
    """
    output.check(out, ".json")
    waiting("loading torch …")
    from grappe.verbs.foresee import tables
    from grappe.verbs.foresee.foresee import foresee as verb

    texts, sizes = _batch_sizes(fields)
    foresight = verb(
        task, plan or (), gpus=gpus, batch_size=sizes, site=site, fields=texts, data=data, times=not no_times
    )
    output.write_json(out, **tables.as_json(foresight))
    fits = [timed.foreseen.fits for timed in foresight.plans if timed.foreseen.needs is not None]
    code = EXIT_FAILURE if all(answer is False for answer in fits) else EXIT_OK
    if json:
        show_json(**tables.as_json(foresight))
        return code
    shown = list(foresight.plans) if plan or all_ else tables.shortlist(foresight, aim)
    columns = (tables.MEMORY_PARTS, tables.TIME_PARTS) if all_ else (tables.SHORT,)
    for line in tables.answer(foresight, aim):
        show(line)
    for part in columns:
        show("")
        show(tables.table(foresight, shown, part))
    if hidden := len(foresight.plans) - len(shown):
        show(f"{count_of(hidden, 'other plan')}: --all shows them")
    show("")
    for line in (*tables.notes(foresight, everything=all_), *(foresight.reasons if plan or all_ else ())):
        show(line)
    return code


@app.command
def measure(
    task: TaskName | None = None,
    /,
    *fields: FieldText,
    plan: Plans = None,
    options: Annotated[_Options, OPTIONS] = DEFAULTS,
    site: Annotated[str | None, Parameter(completer=completion.sites)] = None,
    account: str | None = None,
    job_time: str | None = None,
    dry_run: DryRun = False,
    gather: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    proposal: bool = False,
    nodes: Counts = (),
    training_steps: int | None = None,
    largest_batch: bool = False,
    script: ScriptWords | None = None,
    out: OutFile = None,
    data: DataFolder = None,
    json: Json = False,
) -> int:
    """Measure plans and how they scale: speed, memory, energy, and where efficiency is lost.

    Args:
        plan: A plan to measure; repeatable: one, replicate=2. The first is the baseline.
        site: Submit each training as a Slurm job of this cluster (see: grappe sites).
        account: Account to bill for such jobs.
        job_time: Time limit of such a job: 30m. Default: 1 h.
        dry_run: With --site: print the jobs; submit nothing.
        gather: Train nothing: read these runs, for example those of such jobs.
        proposal: Prove that it scales: with --site its jobs, with --gather its page, HTML, CSV and LaTeX.
        nodes: Node counts of the proof's jobs. Default: 1,2,4, as many as the site's rule asks for.
        training_steps: Optimizer steps of the training to apply for. Default: the task's epochs.
        largest_batch: Find the largest batch that fits, too, under each plan.
        out: Write the figures to this JSON file, for grappe report.
    """
    output.check(out, ".html" if proposal else ".json")
    texts, sizes = _batch_sizes(fields)
    if not proposal and (script or (task is None and (not gather or site is not None or largest_batch or options.why))):
        others = (task, fields, site, account, job_time, dry_run, gather, largest_batch, data)
        if not script or any(others) or options.why or options.weak:
            raise UsageError(
                "grappe measure needs a task; or a script for one process, with --plan, --steps, --repeats, --out and "
                "--json alone: --script train.py"
            )
        _check_later_options(script, plan)
        measured = extensions.module("script", "measure").measure_script
        points = measured(script[0], script[1:], plan or [""], options=options, note=complain, begun=progress)
        return _show_points(points, script[0], out=out, json=json)
    name = task or str((gather or script or [""])[0])
    options = dataclasses.replace(options, batch_size=sizes)
    plans = plan or [""]
    _refuse(
        proposal and not gather and (site is None or bool(task) == bool(script)),
        "--proposal takes --site and a task, or -- train.py; then --gather and the runs of its jobs",
    )
    _refuse(dry_run and site is None, "--dry-run prints the jobs of --site: give a site, or leave it out")
    _refuse(options.why and (site or gather), "--why traces steps on this machine: leave out --site and --gather")
    _refuse(largest_batch and site, "--largest-batch measures on this machine: leave it out with --site")
    _refuse((nodes or training_steps) and not proposal, "--nodes and --training-steps are for --proposal: add it")
    if proposal and gather:
        show_proof = extensions.module("proposal", "proposal").show_proof
        return show_proof(gather, site, training_steps, out, json=json)
    if site is not None:
        by_jobs = extensions.module("slurm", "commands").measure_by_jobs
        return by_jobs(
            name, plans, options, site=site, account=account, time=job_time, fields=fields, data=data, out=out,
            dry_run=dry_run, script=script or (), nodes=nodes if proposal else None, training_steps=training_steps,
        )  # fmt: skip
    if not gather:
        preflight(plans, name)
    from grappe.verbs.measure import measure as verb
    from grappe.verbs.measure.measure import largest_batches as verb_largest

    if gather:
        points = verb.gather(gather)
    else:
        points = verb.measure(
            name, plans, options=options, advise=options.why, data=data, fields=texts, note=complain, begun=progress
        )
    why: list[dict[str, Any]] = []
    explained: list[Table | str] = []
    if options.why:
        lab = extensions.module("lab", "explain")
        explanations = lab.explain(name, points, data=data, fields=texts, note=complain)
        why, explained = [dataclasses.asdict(each) for each in explanations], list(lab.tables(explanations))
    largest = [str(batch) for batch in verb_largest(name, plans, data, texts)] if largest_batch else []
    return _show_points(
        points, name, weak=options.weak, why=why, explained=explained, largest=largest, out=out, json=json
    )


def _refuse(wrong: object, why: str) -> None:
    """Raises UsageError with `why` if anything is `wrong`."""
    if wrong:
        raise UsageError(why)


def _show_points(
    points: Sequence[Measurement],
    task: str,
    *,
    weak: bool = False,
    why: Sequence[Mapping[str, Any]] = (),
    explained: Sequence[Table | str] = (),
    largest: Sequence[str] = (),
    out: Path | None,
    json: bool,
) -> int:
    """Shows measured points; returns the exit code."""
    from grappe.verbs.measure import verdict

    code = EXIT_FAILURE if any(point.failure for point in points) else EXIT_OK
    content = verdict.content(points, task, weak=weak, why=why)
    output.write_json(out, **content)
    if json:
        show_json(**content, largest_batch=list(largest))
        return code
    figures = ["", verdict.table(points), "", *verdict.notes(points)]
    for shown in (*verdict.sentences(points), *explained, *figures, *largest):
        show(shown)
    return code


def _batch_sizes(fields: Sequence[str]) -> tuple[dict[str, str], tuple[int, ...]]:
    """Returns the texts of the fields by name, and the values of batch_size=32,64 apart from them."""
    texts = split(fields)
    return texts, whole_numbers(texts.pop("batch_size", ""), "batch_size")


def _check_later_options(script: Sequence[str], plan: object) -> None:
    """Refuses a plan behind --script, and names other options there, all of which the script gets."""
    if not plan and "--plan" in script:
        raise UsageError("--plan after --script was the script's own option: write --plan replicate=2 before --script")
    if "--against" in script:
        raise UsageError("--against takes a task, and no --script: grappe verify port.py --against train.py")
    for option in ("--out", "--json", "--steps", "--repeats"):
        if option in script:
            complain(f"grappe: {option} after --script went to {script[0]}: write grappe's options before --script")


@app.command
def report(
    *places: Path,
    out: OutFile = None,
    predictions: bool = False,
    weights: bool = False,
    foresee: bool = False,
    json: Json = False,
) -> None:
    """Write one HTML file that opens offline: results, curves, time, memory, scaling, configuration.

    Args:
        places: Runs' or studies' folders, or files of grappe measure --out. Default: the last run.
        out: The file. Default: report.html, in the run's folder if there is one.
        predictions: Predict the validation samples now: a confusion matrix, and pictures, where there are classes.
        weights: Histograms of the parameters' values, of the newest checkpoints.
        foresee: Compare memory and step with the forecast, which traces each model once.
    """
    from grappe.training.run import Run
    from grappe.verbs.report import report as verb
    from grappe.verbs.report.report import compared
    from grappe.verbs.runs import last_run

    output.check(out, streams=False)
    places = places or (last_run(RUNS),)
    if json:
        show_json("report", **compared([Run(place) for place in places]))
    if out is not None or not json:
        file = verb.report(places, out, foresee=foresee, predictions=predictions, weights=weights)
        if not json:
            show(str(file))


@app.command
def follow(run: RunFolder, /) -> None:
    """Follow a run until it ends; Ctrl-C stops the following alone."""
    from grappe.verbs.follow import follow as verb

    verb(run, sys.stdout)


@app.command
def curves(
    *runs: Annotated[Path, Parameter(help="Runs' folders: runs/… (see: grappe runs)")],
    out: Annotated[OutFile, Parameter(help="A file. Default: the standard output.")] = None,
    json: Json = False,
) -> None:
    """Print the curves of runs as CSV: one line per step, one line per evaluation."""
    from grappe.verbs.follow import write_csv

    if not runs:
        raise UsageError("no run given: grappe runs lists them")
    output.check(out)
    if json:
        from grappe.training.run import Run

        every = [Run(place) for place in runs]
        show_json("curves", records=[{"run": run.folder.name, **record} for run in every for record in run.records()])
        return
    stream = sys.stdout if out is None else io.StringIO()
    write_csv(runs, stream)
    if isinstance(stream, io.StringIO):
        output.write(out, stream.getvalue())


COLUMNS = ("plan", "verdict", "first differs", "loss", "gradient norm", "weights", "tolerated")


@app.command
def verify(
    task: TaskName | None = None,
    /,
    *fields: FieldText,
    plan: Plans = None,
    against: Annotated[list[str] | None, Parameter(consume_multiple=True, allow_leading_hyphen=True)] = None,
    record: Path | None = None,
    with_: Annotated[Path | None, Parameter(name="--with")] = None,
    steps: int | None = None,
    script: ScriptWords | None = None,
    out: OutFile = None,
    data: DataFolder = None,
    json: Json = False,
) -> int:
    """Check that plans learn what one plain process learns; if one does not, name the cause and exit with code 1.

    Args:
        plan: A plan to compare with one process; repeatable.
        against: The script that the task was ported from, and its arguments; the last option. The first difference is
            named.
        record: Record what one process computes here, in this file of at most 5 MB, for another machine.
        with_: Compare with such a file of another machine: the first step, unit and operator that differ.
        steps: Optimizer steps of each trial. Default: 8; of a record 4.
        out: Write the findings to this JSON file.
    """
    if script or task is None:
        if not script or any((task, against, record, with_)):
            raise UsageError("grappe verify needs a task, or a script for one process alone: --script train.py")
        _check_later_options(script, plan)
        output.check(out, ".json")
        verify_script = extensions.module("script", "commands").verify_script
        return max(verify_script(script, each, steps or 8, out, json=json) for each in plan or [""])
    if (record or with_) and (against or (record and with_) or len(plan or ()) > 1):
        raise UsageError("--record and --with take one process: leave out --against, and give one of them")
    if not (record or with_ or against or plan):
        raise UsageError("grappe verify needs a plan: give --plan replicate=2, once for each plan")
    output.check(out, ".json")
    output.check(record, streams=False)
    texts = preflight([""] if against else plan or [""], task, fields)
    if record or with_:
        by_record = extensions.module("lab", "commands").verify_by_record
        return by_record(task, (plan or [""])[0], record, with_, steps, out, fields=texts, data=data, json=json)
    steps = 8 if steps is None else steps
    if against:
        verify_against = extensions.module("script", "commands").verify_against
        return verify_against(task, against, steps, out, fields=texts, data=data, json=json)
    from grappe.verbs.verify import verify as verb

    findings = verb.verify(task, plan or (), fields=texts, data=data, steps=steps, note=progress, complain=complain)
    end_progress()
    return _show_verdicts(task, findings, out, json=json)


def _show_verdicts(task: str, findings: Sequence[PlanVerdict], out: Path | None, *, json: bool) -> int:
    """Shows what was found of each plan; returns the exit code."""
    if json:
        show_json("verify", task=task, findings=findings)
    else:
        if all(finding.verdict == "same" for finding in findings):
            say(f"same: {task} learns what it learns on one process")
        tick = " ✓" if (sys.stdout.encoding or "").lower().startswith("utf") else ""
        rows = [verdict_cells(finding, tick * finding.learns_the_same) for finding in findings]
        show(filled_table(COLUMNS, rows))
        reasons = plain_table("", "")
        for finding, (plan_text, *_) in zip(findings, rows, strict=True):
            lines = "\n".join([*finding.causes, *finding.notes]).splitlines()
            for place, line in enumerate(lines):
                reasons.add_row("" if place else plan_text, line)
        if reasons.row_count:
            show("")
            show(reasons)
    output.write_json(out, "verify", task=task, findings=findings)
    return EXIT_OK if all(finding.learns_the_same for finding in findings) else EXIT_FAILURE


def end_progress() -> None:
    """Clears the line of progress, before a result is shown."""
    progress("")
    sys.stderr.flush()


def verdict_cells(finding: PlanVerdict, tick: str = "") -> list[str]:
    """Makes a row under COLUMNS, the verdict with a `tick`; differences are relative."""
    gap, verdict = finding.difference, f"{finding.verdict}{tick}"
    if gap is None:
        return [finding.plan or "one process", verdict, *[""] * 5]
    first = "" if gap.first is None else f"step {gap.first + 1} ({', '.join(map(translated_name, gap.what))})"
    norm = "" if gap.norm is None else f"{gap.norm:.1e}"
    weights = f"{gap.weights:.1e}" + (f" ({gap.tensor})" if gap.tensor else "")
    return [
        finding.plan or "one process", verdict, first, f"{gap.loss:.1e}", norm, weights,
        f"{gap.tolerance:.1e}",
    ]  # fmt: skip
