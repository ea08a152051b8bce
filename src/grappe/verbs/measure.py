"""grappe measure: what plans cost and how they scale, each in fresh processes, by turns; a verdict in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.errors import GrappeError, UsageError
from grappe.options import Options
from grappe.phases import WARMUP
from grappe.place import Place
from grappe.plan import Plan, as_plan
from grappe.run import Run
from grappe.task import Task
from grappe.verbs import session, verdict
from grappe.verbs.points import Point, Process, Trial
from grappe.verbs.train import Request, request
from grappe.verbs.worker import worker as train_worker

STEPS, REPEATS = 30, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One training to be measured, on its way to its processes."""

    training: Request
    count: bool
    """Whether to count the model's operations, and what the device reaches."""

    @property
    def run(self) -> Path | None:
        """Where processes of several nodes meet."""
        return self.training.run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the processes found."""

    usages: Sequence[Mapping[str, Any]]
    batch: int
    flops: float | None = None
    reachable: float | None = None
    why: str = ""


def measure(
    task: Task | type[Task] | str,
    plans: Sequence[Plan | str] = ("",),
    *,
    steps: int = STEPS,
    repeats: int = REPEATS,
    batch_sizes: Sequence[int] = (),
    weak: bool = False,
    advise: bool = True,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Measures each plan at each batch size; the first is what the others are compared with.

    Args:
        steps: timed steps of each training, after a warm-up.
        repeats: trainings of each point; the points take turns, so that a busy moment hits them alike.
        batch_sizes: samples a step over all processes; none: the task's own.
        weak: batch sizes are for one data-parallel process, and grow with their number (weak scaling).
        advise: try what the first verdict suggests, too.
        told: called with a line about each training.

    Raises:
        UsageError: nothing to measure.
        GrappeError: no point could be measured.
    """
    check_numbers(steps, repeats, batch_sizes)
    grid = [(as_plan(plan), batch) for batch in (batch_sizes or (0,)) for plan in plans]
    first = request(task, "", data=data, fields=fields, options=_options(steps))
    with session.scratch("measure") as folder:
        bench = _Bench(first, folder, weak, told)
        points = bench.measured(grid, repeats)
        if advise:
            points += bench.measured(verdict.next_points(points), repeats, origin="advice", weak=False)
    if all(point.failure for point in points):
        raise UsageError(f"nothing could be measured: {points[0].failure}")
    return points


def check_numbers(steps: int, repeats: int, batch_sizes: Sequence[int]) -> None:
    """Raises UsageError where one of them is below 1."""
    for name, value in (
        ("steps", steps),
        ("repeats", repeats),
        *(("batch-size", one) for one in batch_sizes),
    ):
        if value < 1:
            raise UsageError(f"--{name}={value}: it must be at least 1")


class _Bench:
    """Runs trainings by turns."""

    def __init__(self, asked: Request, folder: Path, weak: bool, told: Callable[[str], None]) -> None:
        self._asked, self._folder, self._weak, self._told = asked, folder, weak, told
        self._number = 0

    def measured(
        self, grid: Sequence[tuple[Plan, int]], repeats: int, origin: str = "asked", weak: bool | None = None
    ) -> list[Point]:
        """A point for each of `grid`; batch 0 is the task's own."""
        weak = self._weak if weak is None else weak
        answers: list[list[Answer]] = [[] for _ in grid]
        failures = [""] * len(grid)
        for turn in range(repeats):
            for step in range(len(grid)):
                place = (turn + step) % len(grid)
                plan, batch = grid[place]
                if failures[place]:
                    continue
                try:
                    answers[place].append(self._train(plan, batch, weak, count=turn == 0))
                except GrappeError as error:
                    failures[place] = str(error)
                self._tell(grid[place], turn, repeats, answers[place], failures[place])
        return [
            point(plan, batch, answers[place], failures[place], origin)
            for place, (plan, batch) in enumerate(grid)
        ]

    def _train(self, plan: Plan, batch: int, weak: bool, count: bool) -> Answer:
        self._number += 1
        training = dataclasses.replace(
            self._asked,
            task=with_batch(self._asked.task, batch, plan.data_parallel if weak else 1),
            plan=plan,
            run=self._folder / f"{self._number}",
            base=self._folder,
            quiet=True,
        )
        return session.start("grappe.verbs.measure:worker", Asked(training=training, count=count), plan)

    def _tell(
        self, what: tuple[Plan, int], turn: int, repeats: int, answers: Sequence[Answer], failure: str
    ) -> None:
        plan, batch = what
        title = f"{turn + 1} of {repeats}: {plan or 'one process'}" + (f", batch {batch}" if batch else "")
        if failure:
            self._told(f"{title}: {failure.splitlines()[0]}")
        else:
            step = max(one["timing"]["step"]["median"] for one in answers[-1].usages)
            self._told(f"{title}: {answers[-1].batch / step:,.0f} samples/s")


def with_batch(task: session.TaskReference, batch: int, times: int) -> session.TaskReference:
    """The task with `times` its batch size, or `batch` where that is not 0."""
    if not batch and times == 1:
        return task
    made = task.resolve()
    value = dataclasses.replace(made, batch_size=(batch or made.batch_size) * times)
    if task.value is not None:
        return dataclasses.replace(task, value=value)
    return dataclasses.replace(task, texts={**task.texts, "batch_size": str(value.batch_size)})


def _options(steps: int) -> Options:
    return Options(steps=steps + WARMUP, bare=True)


def worker(asked: Asked, place: Place, meet: Path) -> Answer:
    """One process of a training that is measured. Collective."""
    result = train_worker(asked.training, place, meet)
    task = asked.training.task.resolve()
    if place.rank:
        return Answer(usages=(), batch=task.batch_size)
    answer = Answer(usages=Run(result.run).description["costs"], batch=task.batch_size)
    return _counted(answer, asked, task, place) if asked.count else answer


def _counted(answer: Answer, asked: Asked, task: Task, place: Place) -> Answer:
    from grappe import flops
    from grappe.world import choose_device

    try:
        plan = asked.training.plan
        return dataclasses.replace(
            answer,
            flops=flops.per_sample(task, task.data("train", asked.training.data)),
            reachable=flops.reachable(choose_device(plan, place), plan),
        )
    except Exception as error:  # a task may do what cannot be counted; it was measured all the same
        return dataclasses.replace(answer, why=f"{type(error).__name__}: {error}".splitlines()[0])


def point(plan: Plan, batch: int, answers: Sequence[Answer], failure: str, origin: str) -> Point:
    """The point that `answers` are trials of, or the reason why there are none."""
    empty = Point(
        plan=str(plan), batch=batch, processes=plan.processes, slices=plan.data_parallel, origin=origin
    )
    if failure or not answers:
        return dataclasses.replace(empty, failure=failure or "it was not measured")
    one = answers[0]
    head = one.usages[0]
    why = {name: reason for usage in one.usages for name, reason in usage["why"].items()}
    return dataclasses.replace(
        empty,
        batch=one.batch,
        device=head["device"],
        cores=sum(usage["cores"] for usage in one.usages),
        threads=head["threads"],
        workers=head["workers"],
        flops=one.flops,
        reachable=one.reachable,
        trials=[_trial(answer) for answer in answers],
        why={**why, **({"flops": one.why} if one.why else {})},
    )


def _trial(answer: Answer) -> Trial:
    usages = answer.usages
    joules = [value for usage in usages for value in usage["joules"].values()]
    samples = usages[0]["samples"]
    known = None if not joules or None in joules else sum(joules) / max(1, samples)
    return Trial(
        processes=[
            Process(
                rank=usage["rank"],
                host=usage["host"],
                step=usage["timing"]["step"]["median"],
                phases=usage["timing"]["means"],
                memory=usage["peak"].get("device", usage["peak"].get("host", 0)),
                held=usage["held"],
            )
            for usage in usages
        ],
        steps=usages[0]["timing"]["steps"],
        joules=known,
        cores_used=sum(usage["cpu_seconds"] for usage in usages) / max(usage["seconds"] for usage in usages),
    )
