"""Defines grappe doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.cli import output
from grappe.cli.application import FieldText, Json, OutFile, PlanText, RunsFolder, app, preflight
from grappe.cli.exit import show, show_json
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.launch.files import RUNS
from grappe.launch.rank import is_main_process
from grappe.launch.terminal import say
from grappe.plan import Plan


@app.command
def doctor(
    task: str | None = None,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    runs: RunsFolder = RUNS,
    job: bool = False,
    script: Path | None = None,
    gpu: bool = False,
    record: bool = False,
    passport: bool = False,
    compare: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    out: OutFile = None,
    json: Json = False,
) -> int:
    """Check this machine, or all processes of this allocation, for problems; it takes seconds.

    Args:
        task: Check this task's sizes too.
        job: As the first step of a job: warnings and errors only.
        script: Your own script: of the packages, check those that it imports.
        gpu: Try on the GPU, in about a minute: the bits of random numbers and of exact trainings, readings of memory
            and power.
        record: Record what this machine computes (digits, or the task). When torch, driver, container or processor have
            changed since, grappe doctor offers the comparison.
        passport: Measure this machine, or the slowest node of this allocation, in about a minute: matrix products,
            memory, the disk of --runs, all-reduce.
        compare: Compare with this file of --passport: what is slower here, and how many times. With two files: the
            second with the first, measuring nothing.
        out: File of --passport, .json. Default: runs/passport-HOST-DATE.json.
    """
    if passport or compare or out:
        if any((task, fields, plan, job, script, gpu, record)) or len(compare or ()) > 2 or not (passport or compare):
            raise UsageError(
                "--passport takes --runs, --out, --json and --compare of one or two files: leave out others"
            )
        return _passport(compare or [], runs, out, json=json)
    if gpu:
        from grappe.contrib.doctor.on_device import try_gpu

        trials = []
        for trial in try_gpu():
            trials.append(trial)
            if not json:
                show(f"{trial.verdict:9}  {trial.what}: {trial.text}")
        if json:
            show_json("gpu", trials=trials)
        return EXIT_FAILURE if any(trial.verdict == "FAILED" for trial in trials) else EXIT_OK

    texts = preflight([plan], task, fields)
    if record:
        from grappe.contrib.doctor.checks.kept_record import keep

        file = keep(task, Plan.parse(plan), texts)
        show_json("doctor --record", file=file) if json else say(f"recorded in {file}")
        return EXIT_OK
    from grappe.contrib.doctor import doctor as verb

    request = verb.DoctorRequest(
        plan=Plan.parse(plan), folder=runs.absolute(), job=job, task=task, script=script, fields=texts
    )
    findings = verb.doctor(request)
    if json:
        show_json("doctor", findings=findings)
    elif is_main_process():
        shown = [finding for finding in findings if finding.level != "note"] if job else findings
        if not job:
            say(verb.summary(findings))
        if shown:
            say(verb.text(shown))
    return EXIT_FAILURE if verb.failed(findings) else EXIT_OK


def _passport(compare: Sequence[Path], runs: Path, out: Path | None, *, json: bool) -> int:
    """Measures and keeps a passport, unless `compare` has two files; shows it, or how it compares with the first."""
    from grappe.contrib.doctor import passport as verb

    output.check(out, ".json")
    earlier = [verb.read(file) for file in compare[:2]]
    here = earlier[1] if len(compare) > 1 else verb.measure(runs.absolute())
    lines = [*verb.compare(here, earlier[0])] if compare else [*verb.lines(here)]
    if len(compare) < 2:
        out = out or runs / f"passport-{here.host}-{here.date}.json"
        output.write_json(out, **dataclasses.asdict(here))
        lines.append(f"kept in {out}")
    if json:
        show_json(**dataclasses.asdict(here), lines=lines)
    for line in lines if not json else ():
        show(line)
    return EXIT_OK
