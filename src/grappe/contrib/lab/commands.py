"""Defines the command lr-find, and what grappe verify does with a record of another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grappe.cli import output
from grappe.cli.application import DataFolder, FieldText, Json, OutFile, PlanText, TaskName, app, preflight
from grappe.cli.exit import show_facts, show_json
from grappe.cli.measuring import end_progress
from grappe.errors import EXIT_FAILURE, EXIT_OK
from grappe.fields import split
from grappe.launch.rank import rank_from_environment
from grappe.launch.terminal import progress, say

if TYPE_CHECKING:
    from grappe.contrib.lab.lr_find import LearningRates
    from grappe.contrib.lab.record import Recorded


@app.command
def lr_find(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    ramp: Literal["exponential", "linear"] = "exponential",
    lowest: float | None = None,
    highest: float | None = None,
    steps: int = 100,
    seeds: int = 3,
    out: OutFile = None,
    data: DataFolder = None,
    json: Json = False,
) -> int:
    """Find a range of good learning rates, from short trainings that are not kept. Exit code 1 if there is none.

    Args:
        ramp: How the learning rate rises: by a factor at each step, or by an amount.
        lowest: The first learning rate. Default: a thousandth of the task's own.
        highest: The last. Default: a thousand times the task's own.
        steps: Optimizer steps of each training.
        seeds: Trainings, each with the next seed.
        out: Write the curves to this JSON file, for grappe report.
    """
    from grappe.contrib.lab import lr_find as verb

    texts = split(fields)
    ramp_options = verb.Ramp(kind=ramp, lowest=lowest, highest=highest, steps=steps, seeds=seeds)
    output.check(out, ".json")
    preflight([plan], task, once=True)
    result = verb.lr_find(task, plan, ramp=ramp_options, fields=texts, data=data)
    process = rank_from_environment()
    if process is None or process.rank == 0:
        output.write_json(out, **result.as_json())
        if json:
            show_json(**result.as_json())
        else:
            _show_band(result)
    return EXIT_OK if result.advice.band is not None else EXIT_FAILURE


def _show_band(result: LearningRates) -> None:
    from grappe.contrib.lab.lr_find import plain, plot

    for line in plot(result):
        say(line)
    band = result.advice.band
    if band is None:
        facts = [("no suggestion", result.advice.reason)]
    else:
        ended = ", where the ramp ended: give a larger --highest to see more" if band.reaches_the_end else ""
        name = "lr=" if result.is_field else "the optimizer's learning rate: "
        facts = [
            ("steepest", plain(band.steepest)),
            ("largest stable", f"{plain(band.largest_stable)}{ended}"),
            ("suggested", f"{name}{plain(band.suggested)}  (the task's own: {plain(result.own)})"),
        ]
    show_facts(facts)


def verify_by_record(
    task: str,
    plan: str,
    record: Path | None,
    with_: Path | None,
    steps: int | None,
    out: Path | None,
    *,
    fields: Mapping[str, str],
    data: Path | None,
    json: bool,
) -> int:
    """Records what one process computes here in `record`, or compares it with the record `with_`; the exit code."""
    from grappe.contrib.lab import record as recording

    there = None if with_ is None else recording.read(with_)
    progress("a few steps of one plain process")
    steps = recording.STEPS if steps is None else steps
    here = recording.record(task, plan, fields=fields, data=data, steps=steps, other=there)
    end_progress()
    if record is not None:
        return _show_recorded(task, here, record, json=json)
    return _show_compared(task, here, out, json=json)


def _show_recorded(task: str, here: Recorded, record: Path, *, json: bool) -> int:
    """Writes a record, and shows what is in it."""
    from grappe.contrib.lab import record as recording

    kept, results = recording.write(here, record)
    facts = {"steps": kept, "results": results, "calls": len(here.calls), **here.header.machine}
    if json:
        show_json("verify --record", task=task, file=record, **facts)
        return EXIT_OK
    command = recording.comparison(here.header, record.name)
    say(f"recorded in {record}: on another machine, {command} compares")
    show_facts([(name, str(value)) for name, value in facts.items() if value])
    if left := len(here.results) - results:
        say(f"note: {left:,} results were left out: a record has at most 5 MB")
    return EXIT_OK


def _show_compared(task: str, here: Recorded, out: Path | None, *, json: bool) -> int:
    """Shows whether two machines compute the same; returns the exit code."""
    verdict = here.verdict
    assert verdict is not None
    script = Path("show.py" if out is None else out.with_suffix(".py"))
    if verdict.script:
        output.write(script, verdict.script)
    form = {"task": task, **dataclasses.asdict(verdict)}
    if json:
        show_json("verify --with", **form)
    else:
        but = verdict.verdict == "same but for"
        say(" ".join(filter(None, [verdict.verdict + ":" * (not but and bool(verdict.because)), verdict.because])))
        show_facts([
            ("results compared", f"{verdict.results:,}, and {verdict.calls:,} calls of operators on drawn inputs"),
            *([("operator", verdict.operator)] if verdict.operator else []),
            *([("script", f"{script}: shows the call, for who makes the library")] if verdict.script else []),
            ("largest difference", f"{verdict.largest:.1e} of a norm; rounding alone: {verdict.noise[0]:.1e} there, "
             f"{verdict.noise[1]:.1e} here"),
            *(("another machine", change) for change in verdict.machines),
        ])  # fmt: skip
        if here.header.draws:
            say("note: random numbers of the model are replaced by their means: dropout itself is not compared")
    output.write_json(out, "verify --with", **form)
    return EXIT_FAILURE if verdict.verdict == "different" else EXIT_OK
