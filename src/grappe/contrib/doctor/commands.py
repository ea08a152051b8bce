"""Defines grappe doctor."""

from __future__ import annotations

from pathlib import Path

from grappe.cli.application import FieldText, Json, PlanText, RunsFolder, app, preflight
from grappe.cli.exit import show, show_json
from grappe.errors import EXIT_FAILURE, EXIT_OK
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
    json: Json = False,
) -> int:
    """Check this machine, or all processes of this allocation, for problems; it takes seconds.

    Args:
        task: Check this task's sizes too.
        job: As the first step of a job: warnings and errors only.
        script: Your own script: of the packages, check those that it imports.
        gpu: Try on the GPU, in about a minute: the bits of random numbers and of exact trainings, readings of memory
            and power, the speed of a matrix product.
        record: Record what this machine computes (digits, or the task). When torch, driver, container or processor have
            changed since, grappe doctor offers the comparison.
    """
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
