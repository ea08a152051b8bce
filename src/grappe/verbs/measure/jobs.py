"""grappe measure --site: measures points in Slurm jobs, one training each, and gathers the results afterwards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from grappe import tasks
from grappe.errors import RunError, UsageError
from grappe.fields import split
from grappe.plan import Plan
from grappe.profiling.phases import WARMUP
from grappe.sites.sbatch import JobOptions
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.verbs.measure.measure import RunFigures, point
from grappe.verbs.measure.points import Measurement, MeasureOptions
from grappe.verbs.submit.jobs import newest_job, submitted
from grappe.verbs.submit.submission import Submission
from grappe.verbs.submit.submit import Submitted, submit_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The input of a measurement in Slurm jobs on a site."""

    task: str
    fields: tuple[str, ...]
    plans: tuple[str, ...]
    options: MeasureOptions
    job: JobOptions
    data: str | None


def send(request: JobRequest, *, show: bool = False) -> Iterator[Submitted]:
    """Submits a job for each point and repetition; with `show`, only renders the scripts.

    Raises:
        GrappeError: the request is wrong, or sbatch rejects a job.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    points = [
        (text, batch)
        for _ in range(request.options.repeats)
        for batch in request.options.batch_size or (0,)
        for text in request.plans
    ]
    submissions = []
    for number, (text, batch) in enumerate(points, 1):
        fields = request.fields
        if batch or request.options.weak:
            total = batch or tasks.make(tasks.find(request.task), split(fields)).batch_size
            total *= Plan.parse(text).data_parallel if request.options.weak else 1
            fields = (
                *(field for field in fields if not field.startswith("batch_size=")), f"batch_size={total}"
            )  # fmt: skip
        options = Options(steps_only=True, steps=request.options.steps + WARMUP)
        submissions.append(
            Submission(
                task=request.task,
                arguments=(request.task, *fields, "--steps-only", "--steps", str(options.steps)),
                plans=(text,),
                fields=fields,
                run=request.job.base / f"measure-{stamp}-{number}",
                data=request.data,
                options=options,
                job=dataclasses.replace(request.job, restarts=0),
            )
        )
    yield from submit_all(submissions, show=show)


def gather(places: Sequence[Path]) -> list[Measurement]:
    """Gathers points from ended runs: runs of one plan and batch size are trials of one point.

    The first point, with which the others are compared, is one with the fewest processes.

    Raises:
        RunError: one of the folders is no run.
        UsageError: no run has ended.
    """
    figures: dict[tuple[str, int], list[RunFigures]] = {}
    failures: dict[tuple[str, int], str] = {}
    not_started: list[Measurement] = []
    for place in places:
        if not Run.is_run(place) and submitted(place):
            # Of a job without results, only the run's name is known.
            failure = f"its job {newest_job(place)} waits, or ended before it began: grappe queue, grappe logs {place}"
            not_started.append(Measurement(plan=place.name, batch=0, processes=0, slices=0, failure=failure))
            continue
        run = Run(place)
        description = run.read_description()
        fields = description.get("fields")
        batch = fields.get("batch_size") if isinstance(fields, dict) else None
        if not isinstance(batch, int):
            raise RunError(f"{run.folder}: its run.json says no batch_size")
        key = (str(description.get("plan") or ""), batch)
        trials = figures.setdefault(key, [])
        usages = description.get("costs")
        if not isinstance(usages, list) or not usages:
            failures[key] = f"{run.folder} has not ended ({description.get('status')})"
        elif not all(usage.get("timing") for usage in usages):
            failures[key] = (
                f"{run.folder} was too short: the first {WARMUP} steps warm up, and are not counted"
            )
        else:
            trials.append(RunFigures(usages=usages, batch=batch, uncounted="jobs do not count them"))
    points = [
        point(Plan.parse(text), batch, trials, "" if trials else failures[text, batch], "asked")
        for (text, batch), trials in figures.items()
    ]
    points = [*sorted(points, key=lambda point: point.processes), *not_started]
    if all(point.failure for point in points):
        raise UsageError(f"nothing to gather yet: {points[0].failure if points else 'no run was given'}")
    return points
