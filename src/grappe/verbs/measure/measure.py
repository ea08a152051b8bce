"""grappe measure: measures plans and how they scale, in new processes, by turns; gives a verdict in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.errors import GrappeError, UsageError
from grappe.launch.folders import scratch
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan, as_plan
from grappe.profiling.phases import WARMUP
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker as train_worker
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import Measurement, MeasureOptions, ProcessTimes, TimedRun
from grappe.words import first_line, plan_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """The input of a measured training's processes."""

    training: Request
    count: bool
    """Whether to count the model's operations, and to measure the device's FLOP/s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The measurements of a training's processes."""

    usages: Sequence[Mapping[str, Any]]
    batch: int
    flops: float | None = None
    reachable: float | None = None
    uncounted: str = ""
    """The reason why the operations could not be counted."""


def measure(
    task: Task | type[Task] | str,
    plans: Sequence[Plan | str] = ("",),
    *,
    options: MeasureOptions | None = None,
    advise: bool = True,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Measurement]:
    """Measures each plan at each batch size; the first point is the baseline of the comparison.

    Args:
        options: the extent of each measurement; the points take turns, so that a busy moment affects all equally.
        advise: whether to measure the plans that the first verdict suggests, too.
        note: callback, called with a line about each training.

    Raises:
        UsageError: there is nothing to measure.
        GrappeError: no point could be measured.
    """
    options = options or MeasureOptions()
    grid = [(as_plan(plan), batch) for batch in (options.batch_size or (0,)) for plan in plans]
    request = Request(
        task=TaskReference.of(task, fields),
        plan=Plan(),
        data=data_folder(data),
        options=Options(steps=options.steps + WARMUP, steps_only=True),
    )
    with scratch("measure") as folder:
        points = _measured(request, folder, grid, options.repeats, note, weak=options.weak)
        if advise:
            advice = verdict.next_points(points)
            points += _measured(request, folder, advice, options.repeats, note, origin="advice")
    if all(point.failure for point in points):
        raise UsageError(f"nothing could be measured: {points[0].failure}")
    return points


def _measured(
    request: Request,
    folder: Path,
    grid: Sequence[tuple[Plan, int]],
    repeats: int,
    note: Callable[[str], None],
    *,
    origin: str = "asked",
    weak: bool = False,
) -> list[Measurement]:
    """Measures a point for each entry of `grid`, by turns; batch 0 is the task's own batch size."""
    figures: list[list[RunFigures]] = [[] for _ in grid]
    failures = [""] * len(grid)
    for turn in range(repeats):
        for step in range(len(grid)):
            index = (turn + step) % len(grid)
            plan, batch = grid[index]
            if failures[index]:
                continue
            title = f"{turn + 1} of {repeats}: {plan_name(plan)}" + (f", batch {batch}" if batch else "")
            training = dataclasses.replace(
                request,
                task=with_batch(request.task, batch, plan.data_parallel if weak else 1),
                plan=plan,
                run=folder / f"{origin}-{index}-{turn}",
                base=folder,
                quiet=True,
            )
            measured = MeasureRequest(training=training, count=turn == 0)
            try:
                result = start("grappe.verbs.measure.measure:worker", measured, plan, run=training.run)
            except GrappeError as error:
                failures[index] = str(error)
                note(f"{title}: {first_line(failures[index])}")
            else:
                figures[index].append(result)
                seconds = max(usage["timing"]["step"]["median"] for usage in result.usages)
                note(f"{title}: {result.batch / seconds:,.0f} samples/s")
    return [
        point(plan, batch, figures[index], failures[index], origin)
        for index, (plan, batch) in enumerate(grid)
    ]


def with_batch(task: TaskReference, batch: int, times: int) -> TaskReference:
    """Returns the task with `times` its batch size, or times `batch` where that is not 0."""
    if not batch and times == 1:
        return task
    return with_fields(task, batch_size=(batch or task.resolve().batch_size) * times)


def with_fields(task: TaskReference, **values: int) -> TaskReference:
    """Returns the task with other values of some of its fields."""
    if task.value is not None:
        return dataclasses.replace(task, value=dataclasses.replace(task.value, **values))
    return dataclasses.replace(
        task, texts={**task.texts, **{name: str(value) for name, value in values.items()}}
    )


def worker(request: MeasureRequest, process: ProcessRank, rendezvous_folder: Path) -> RunFigures:
    """Runs one process of a measured training. Collective."""
    from grappe.data.prepare import dataset_of
    from grappe.launch.world import choose_device
    from grappe.verbs.measure import flops

    result = train_worker(request.training, process, rendezvous_folder)
    task, plan = request.training.task.resolve(), request.training.plan
    if process.rank:
        return RunFigures(usages=(), batch=task.batch_size)
    figures = RunFigures(usages=Run(result.run).read_description()["costs"], batch=task.batch_size)
    if not request.count:
        return figures
    try:
        return dataclasses.replace(
            figures,
            flops=flops.per_sample(task, dataset_of(task, "train", request.training.data)),
            reachable=flops.reachable(choose_device(plan, process), plan),
        )
    except Exception as error:  # a task may do what cannot be counted; it was measured all the same
        return dataclasses.replace(figures, uncounted=first_line(f"{type(error).__name__}: {error}"))


def point(plan: Plan, batch: int, figures: Sequence[RunFigures], failure: str, origin: str) -> Measurement:
    """Makes the point with `figures` as trials, or with the reason why there are none."""
    empty = Measurement(
        plan=str(plan), batch=batch, processes=plan.processes, slices=plan.data_parallel, origin=origin
    )
    if failure or not figures:
        return dataclasses.replace(empty, failure=failure or "it was not measured")
    first = figures[0]
    head = first.usages[0]
    unmeasured = {name: reason for usage in first.usages for name, reason in usage["why"].items()}
    return dataclasses.replace(
        empty,
        batch=first.batch,
        device=head["device"],
        cores=sum(usage["cores"] for usage in first.usages),
        threads=head["threads"],
        workers=head["workers"],
        flops=first.flops,
        reachable=first.reachable,
        trials=[_trial(figure) for figure in figures],
        unmeasured={**unmeasured, **({"flops": first.uncounted} if first.uncounted else {})},
    )


def _trial(figure: RunFigures) -> TimedRun:
    usages = figure.usages
    joules = [value for usage in usages for value in usage["joules"].values()]
    samples = usages[0]["samples"]
    return TimedRun(
        processes=[
            ProcessTimes(
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
        joules=None if not joules or None in joules else sum(joules) / max(1, samples),
        cores_used=sum(usage["cpu_seconds"] for usage in usages) / max(usage["seconds"] for usage in usages),
    )
