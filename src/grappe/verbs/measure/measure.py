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
from grappe.verbs.measure.options import MeasureOptions
from grappe.verbs.measure.points import Measurement, ProcessTimes, TimedRun
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
    first = Request(
        task=TaskReference.of(task, fields),
        plan=Plan(),
        data=data_folder(data),
        options=_options(options.steps),
    )
    with scratch("measure") as folder:
        runner = _Runner(first, folder, options.weak, note)
        points = runner.measured(grid, options.repeats)
        if advise:
            points += runner.measured(
                verdict.next_points(points), options.repeats, origin="advice", weak=False
            )
    if all(point.failure for point in points):
        raise UsageError(f"nothing could be measured: {points[0].failure}")
    return points


class _Runner:
    """Runs trainings by turns."""

    def __init__(self, request: Request, folder: Path, weak: bool, note: Callable[[str], None]) -> None:
        self._request, self._folder, self._weak, self._note = request, folder, weak, note
        self._number = 0

    def measured(
        self, grid: Sequence[tuple[Plan, int]], repeats: int, origin: str = "asked", weak: bool | None = None
    ) -> list[Measurement]:
        """Measures a point for each entry of `grid`; batch 0 is the task's own batch size."""
        weak = self._weak if weak is None else weak
        figures: list[list[RunFigures]] = [[] for _ in grid]
        failures = [""] * len(grid)
        for turn in range(repeats):
            for step in range(len(grid)):
                index = (turn + step) % len(grid)
                plan, batch = grid[index]
                if failures[index]:
                    continue
                try:
                    figures[index].append(self._train(plan, batch, weak, count=turn == 0))
                except GrappeError as error:
                    failures[index] = str(error)
                self._report(grid[index], turn, repeats, figures[index], failures[index])
        return [
            point(plan, batch, figures[index], failures[index], origin)
            for index, (plan, batch) in enumerate(grid)
        ]

    def _train(self, plan: Plan, batch: int, weak: bool, count: bool) -> RunFigures:
        self._number += 1
        training = dataclasses.replace(
            self._request,
            task=with_batch(self._request.task, batch, plan.data_parallel if weak else 1),
            plan=plan,
            run=self._folder / f"{self._number}",
            base=self._folder,
            quiet=True,
        )
        return start(
            "grappe.verbs.measure.measure:worker",
            MeasureRequest(training=training, count=count),
            plan,
            run=training.run,
        )

    def _report(
        self, what: tuple[Plan, int], turn: int, repeats: int, figures: Sequence[RunFigures], failure: str
    ) -> None:
        plan, batch = what
        title = f"{turn + 1} of {repeats}: {plan_name(plan)}" + (f", batch {batch}" if batch else "")
        if failure:
            self._note(f"{title}: {first_line(failure)}")
        else:
            step = max(usage["timing"]["step"]["median"] for usage in figures[-1].usages)
            self._note(f"{title}: {figures[-1].batch / step:,.0f} samples/s")


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


def _options(steps: int) -> Options:
    return Options(steps=steps + WARMUP, steps_only=True)


def worker(request: MeasureRequest, process: ProcessRank, rendezvous_folder: Path) -> RunFigures:
    """Runs one process of a measured training. Collective."""
    result = train_worker(request.training, process, rendezvous_folder)
    task = request.training.task.resolve()
    if process.rank:
        return RunFigures(usages=(), batch=task.batch_size)
    figure = RunFigures(usages=Run(result.run).read_description()["costs"], batch=task.batch_size)
    return _counted(figure, request, task, process) if request.count else figure


def _counted(figure: RunFigures, request: MeasureRequest, task: Task, process: ProcessRank) -> RunFigures:
    from grappe.data.prepare import dataset_of
    from grappe.launch.world import choose_device
    from grappe.verbs.measure import flops

    try:
        plan = request.training.plan
        return dataclasses.replace(
            figure,
            flops=flops.per_sample(task, dataset_of(task, "train", request.training.data)),
            reachable=flops.reachable(choose_device(plan, process), plan),
        )
    except Exception as error:  # a task may do what cannot be counted; it was measured all the same
        return dataclasses.replace(figure, uncounted=first_line(f"{type(error).__name__}: {error}"))


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
