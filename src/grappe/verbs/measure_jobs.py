"""grappe measure --site: points as Slurm jobs, each a training of its own, and gathered once they have ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe import tasks
from grappe.errors import RunError, UsageError
from grappe.fields import split
from grappe.phases import WARMUP
from grappe.plan import Plan
from grappe.run import Run
from grappe.verbs.jobs import newest_job, submitted
from grappe.verbs.measure import Answer, check_numbers, point
from grappe.verbs.points import Point
from grappe.verbs.submit import Submission, Submitted, submit_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured, and where."""

    task: str
    fields: tuple[str, ...]
    plans: tuple[str, ...]
    steps: int
    repeats: int
    batch_sizes: tuple[int, ...]
    weak: bool
    site: str | None
    account: str | None
    time: str | None
    data: str | None
    base: Path = Path("runs")


def send(wanted: Wanted, *, show: bool = False) -> Iterator[Submitted]:
    """Submits a job for each point and repetition; with `show`, renders the scripts only.

    Raises:
        GrappeError: something is wrong with what was asked, or sbatch refuses.
    """
    check_numbers(wanted.steps, wanted.repeats, wanted.batch_sizes)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    points = [
        (text, batch)
        for _ in range(wanted.repeats)
        for batch in wanted.batch_sizes or (0,)
        for text in wanted.plans
    ]
    asked = [
        _submission(wanted, text, batch, wanted.base / f"measure-{stamp}-{number}")
        for number, (text, batch) in enumerate(points, 1)
    ]
    yield from submit_all(asked, show=show)


def _submission(wanted: Wanted, plan: str, batch: int, run: Path) -> Submission:
    fields = wanted.fields
    if batch or wanted.weak:
        own = batch or _batch_of(wanted)
        whole = own * (Plan.parse(plan).data_parallel if wanted.weak else 1)
        fields = (*(one for one in fields if not one.startswith("batch_size=")), f"batch_size={whole}")
    options = ("--bare", "--steps", str(wanted.steps + WARMUP))
    return Submission(
        task=wanted.task,
        arguments=(wanted.task, *fields, *options),
        plan=plan,
        fields=fields,
        run=run,
        data=wanted.data,
        site=wanted.site,
        account=wanted.account,
        time=wanted.time,
        base=wanted.base,
        restarts=0,
    )


def _batch_of(wanted: Wanted) -> int:
    return tasks.make(tasks.find(wanted.task), split(wanted.fields)).batch_size


def gather(places: Sequence[Path]) -> list[Point]:
    """Points of runs that have ended: those of one plan and batch size are trials of one point.

    The first, with which the others are compared, is one with the fewest processes.

    Raises:
        RunError: one of them is no run.
        UsageError: none of them has ended.
    """
    answers: dict[tuple[str, int], list[Answer]] = {}
    failures: dict[tuple[str, int], str] = {}
    unborn: list[Point] = []
    for place in places:
        if not Run.is_run(place) and submitted(place):
            unborn.append(_unborn(place))
            continue
        run = Run(place)
        known = run.description
        fields = known.get("fields")
        batch = fields.get("batch_size") if isinstance(fields, dict) else None
        if not isinstance(batch, int):
            raise RunError(f"{run.folder}: its run.json says no batch_size")
        key = (str(known.get("plan") or ""), batch)
        found = answers.setdefault(key, [])
        try:
            usages = _usages(run, known)
        except UsageError as why:
            failures[key] = str(why)
        else:
            found.append(Answer(usages=usages, batch=batch, why="jobs do not count them"))
    points = [
        point(Plan.parse(text), batch, found, "" if found else failures[text, batch], "asked")
        for (text, batch), found in answers.items()
    ]
    points = [*sorted(points, key=lambda one: one.processes), *unborn]
    if all(one.failure for one in points):
        raise UsageError(f"nothing to gather yet: {points[0].failure if points else 'no run was given'}")
    return points


def _usages(run: Run, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run's processes used.

    Raises:
        UsageError: it is no trial of a point, and why.
    """
    usages = known.get("costs")
    if not isinstance(usages, list) or not usages:
        raise UsageError(f"{run.folder} has not ended ({known.get('status')})")
    if not all(one.get("timing") for one in usages):
        raise UsageError(f"{run.folder} was too short: the first {WARMUP} steps warm up, and are not counted")
    return usages


def _unborn(place: Path) -> Point:
    """A row for a job that has left nothing yet, and of which only the run's name is known."""
    failure = (
        f"its job {newest_job(place)} waits, or ended before it began: grappe queue, grappe logs {place}"
    )
    return Point(plan=place.name, batch=0, processes=0, slices=0, failure=failure)
