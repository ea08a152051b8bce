"""grappe measure --site: points as Slurm jobs, each a training of its own, and gathered once they have ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from grappe import tasks
from grappe.errors import RunError, UsageError
from grappe.fields import split
from grappe.phases import WARMUP
from grappe.plan import Plan
from grappe.run import Run
from grappe.verbs.measure import NEVER, Answer, point
from grappe.verbs.points import Point
from grappe.verbs.submit import Submission, Submitted, submit


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
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 0
    for _ in range(wanted.repeats):
        for batch in wanted.batch_sizes or (0,):
            for text in wanted.plans:
                number += 1
                run = wanted.base / f"measure-{stamp}-{number}"
                yield from submit(_submission(wanted, text, batch, run), show=show)


def _submission(wanted: Wanted, plan: str, batch: int, run: Path) -> Submission:
    fields = wanted.fields
    if batch or wanted.weak:
        own = batch or _batch_of(wanted)
        whole = own * (Plan.parse(plan).data_parallel if wanted.weak else 1)
        fields = (*(one for one in fields if not one.startswith("batch_size=")), f"batch_size={whole}")
    options = (
        "--steps",
        str(wanted.steps + WARMUP),
        "--evaluate-every",
        str(NEVER),
        "--save-every",
        str(NEVER),
    )
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
    for place in places:
        run = Run(place)
        known = run.description
        fields = known.get("fields")
        batch = fields.get("batch_size") if isinstance(fields, dict) else None
        if not isinstance(batch, int):
            raise RunError(f"{run.folder}: its run.json says no batch_size")
        key = (str(known.get("plan") or ""), batch)
        costs = known.get("costs")
        if isinstance(costs, list) and costs and all(one.get("timing") for one in costs):
            answers.setdefault(key, []).append(Answer(usages=costs, batch=batch))
        else:
            failures[key] = f"{run.folder} has not ended ({known.get('status')})"
            answers.setdefault(key, [])
    points = [
        point(Plan.parse(text), batch, found, "" if found else failures[text, batch], "asked")
        for (text, batch), found in answers.items()
    ]
    if all(one.failure for one in points):
        raise UsageError(f"nothing to gather yet: {points[0].failure if points else 'no run was given'}")
    return sorted(points, key=lambda one: one.processes)
