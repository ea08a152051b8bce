"""grappe measure: measures plans and how they scale, here by turns or in Slurm jobs; finds the largest batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from grappe.data.datasets import dataset_of, prepare
from grappe.data.stream import head
from grappe.errors import GrappeError, RunError, UsageError
from grappe.errors.foreign_text import number
from grappe.launch.files import scratch
from grappe.launch.rank import ProcessRank
from grappe.launch.world import choose_device
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.profiling import memory
from grappe.profiling.phases import WARMUP
from grappe.task import Task
from grappe.training.job_records import newest_job, submitted
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.short_run import short_training
from grappe.training.task_reference import SCRIPT, TaskReference
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import Measurement, Measurements, MeasureOptions, ProcessTimes, TimedRun
from grappe.words import first_line, plan_name


def measure(
    task: Task | type[Task] | str,
    plans: Sequence[AnyPlan] = ("",),
    *,
    options: MeasureOptions | None = None,
    advise: bool = False,
    data: Path | str | None = None,
    fields: Mapping[str, object] | None = None,
    note: Callable[[str], None] = lambda line: None,
    begun: Callable[[str], None] = lambda line: None,
) -> Measurements:
    """Measures each plan at each batch size; the first point is the baseline of the comparison.

    Args:
        options: the extent of each measurement; the points take turns, so that a busy moment affects all equally.
        advise: whether to measure a larger batch, too, for `explain`.
        note: callback, called with a line about each training that has ended.
        begun: callback, called with a line about each training that begins.

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

    def train(plan: Plan, batch: int, turn: int, run: Path, *, weak: bool = False) -> Measurement:
        task = request.task.with_batch(batch, plan.data_parallel if weak else 1)
        training = dataclasses.replace(request, task=task, plan=plan)
        return short_training(training, run, functools.partial(measured_point, count=turn == 0))

    load = before if (before := os.getloadavg()[0]) > 1 + (os.cpu_count() or 1) else 0.0
    with scratch("measure") as folder:
        points = measured_in_turns(
            functools.partial(train, weak=options.weak), folder, grid, options.repeats, note, begun
        )
        if advise:
            larger = verdict.larger_batch(points)
            tried = measured_in_turns(train, folder / "advice", larger, options.repeats, note, begun)
            points += [dataclasses.replace(point, origin="advice") for point in tried]
    return not_all_failed([dataclasses.replace(point, load=load) for point in points])


def not_all_failed(points: list[Measurement]) -> Measurements:
    """Returns the points; if none was measured, raises the first one's failure."""
    if all(point.failure for point in points):
        raise UsageError(f"nothing could be measured: {points[0].failure}")
    return Measurements(points)


def measured_in_turns(
    train: Callable[[Plan, int, int, Path], Measurement],
    folder: Path,
    grid: Sequence[tuple[Plan, int]],
    repeats: int,
    note: Callable[[str], None],
    begun: Callable[[str], None],
) -> list[Measurement]:
    """Measures a point for each entry of `grid`, by turns of train(plan, batch, turn, run); batch 0: the task's own."""
    runs: list[list[Measurement]] = [[] for _ in grid]
    failures = [""] * len(grid)
    for turn in range(repeats):
        for step in range(len(grid)):
            index = (turn + step) % len(grid)
            plan, batch = grid[index]
            if failures[index]:
                continue
            title = f"{turn + 1} of {repeats}: {plan_name(plan)}" + (f", batch {batch}" if batch else "")
            begun(f"training {turn * len(grid) + step + 1} of {repeats * len(grid)}: {plan_name(plan)} …")
            try:
                run = train(plan, batch, turn, folder / f"{index}-{turn}")
            except GrappeError as error:
                failures[index] = str(error)
                note(f"{title}: {first_line(failures[index])}")
            else:
                runs[index].append(run)
                note(f"{title}: {run.rate:,.0f} samples/s")
    return [_point(*entry, trials, failure) for entry, trials, failure in zip(grid, runs, failures, strict=True)]


def _point(plan: Plan, batch: int, runs: Sequence[Measurement], failure: str) -> Measurement:
    """Returns the point with all trials of `runs`, or with the reason why there are none."""
    if failure:
        return Measurement(
            plan=str(plan), batch=batch, processes=plan.processes, slices=plan.data_parallel, failure=failure
        )
    return dataclasses.replace(runs[0], trials=[trial for run in runs for trial in run.trials])


def measured_point(run: Run, request: Request, process: ProcessRank, *, count: bool) -> Measurement:
    """Makes a point of one trial from a training that this process has ended.

    Args:
        count: whether to count the model's operations, and to measure the device's FLOP/s.
    """
    from grappe.verbs.measure import flops

    task, plan = request.task.resolve(), request.plan
    point = dataclasses.replace(point_of_run(run), plan=str(plan))
    if not count:
        return point
    try:
        return dataclasses.replace(
            point,
            flops=flops.per_sample(task, head(dataset_of(task, "train", request.data), flops.ROWS)),
            reachable=flops.reachable(choose_device(plan, process), plan),
        )
    except Exception as error:  # a task may do what cannot be counted; it was measured all the same
        reason = first_line(f"{type(error).__name__}: {error}")
        return dataclasses.replace(point, unmeasured={**point.unmeasured, "flops": reason})


def rows_of_a_step(run: Run) -> int:
    """Returns the median number of samples of a launched script's steps, from its curves; 0: they are not known."""
    samples = [int(number(record.get("samples"))) for record in run.records("step")]
    return statistics.median_high([after - before for before, after in itertools.pairwise([0, *samples])] or [0])


def point_of_run(run: Run) -> Measurement:
    """Makes a point of one trial from the use of resources by the processes of an ended run, of a task or a script."""
    description = run.read_description()
    plan, usages = Plan.parse(description["plan"]), description["costs"]
    head, is_script = usages[0], description.get("class") == SCRIPT
    batch = rows_of_a_step(run) if is_script else description["fields"]["batch_size"]
    reasons = {"flops": "a script's are not counted"} if is_script else {}
    if not batch:
        reasons["samples"] = "no DataLoader gives the batches: a step counts as one sample"
    joules = [value for usage in usages for value in usage["joules"].values()]
    trial = TimedRun(
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
        joules=None if not joules or None in joules else sum(joules) / max(1, head["samples"]),
    )
    return Measurement(
        plan=str(plan),
        batch=batch or 1,
        processes=plan.processes,
        slices=plan.data_parallel,
        device=head["device"],
        cores=sum(usage["cores"] for usage in usages),
        threads=head["threads"],
        workers=head["workers"],
        sent=head.get("sent", {}),
        origin="script" if is_script else "asked",
        trials=[trial],
        unmeasured={name: reason for usage in usages for name, reason in usage["why"].items()} | reasons,
    )


def gather(places: Sequence[Path]) -> list[Measurement]:
    """Gathers points from ended runs: runs of one plan and batch size are trials of one point.

    The first point, with which the others are compared, is one with the fewest processes.

    Raises:
        RunError: one of the folders is no run.
        UsageError: no run has ended.
    """
    runs: dict[tuple[str, int], list[Measurement]] = {}
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
        batch = description.get("fields", {}).get("batch_size")
        if description.get("class") == SCRIPT:
            batch = rows_of_a_step(run)
        if not isinstance(batch, int):
            raise RunError(f"{run.folder}: its run.json has no batch_size")
        key = (description.get("plan", ""), batch)
        trials = runs.setdefault(key, [])
        usages = description.get("costs")
        if not usages:
            failures[key] = f"{run.folder} has not ended ({description.get('status')})"
        elif not all(usage.get("timing") for usage in usages):
            failures[key] = f"{run.folder} was too short: the first {WARMUP} steps warm up, and are not counted"
        else:
            point = point_of_run(run)
            reasons = {"flops": "jobs do not count them", **point.unmeasured}
            trials.append(dataclasses.replace(point, unmeasured=reasons))
    points = [
        _point(Plan.parse(key[0]), key[1], trials, "" if trials else failures[key]) for key, trials in runs.items()
    ]
    points = [*sorted(points, key=lambda point: point.processes), *not_started]
    if all(point.failure for point in points):
        raise UsageError(f"nothing to gather yet: {points[0].failure if points else 'no run was given'}")
    return points


STEPS = 3  # the optimizer's state comes with the first, the second has it and the gradients
EIGHTHS = 8  # how close the answer is: no more than an eighth below what just fits
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|MemoryError|bad_alloc|killed by SIGKILL|Cannot allocate",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The result of a search for a plan's largest batch."""

    plan: str
    batch: int
    """Samples per step over all processes; 0: even the smallest batch does not fit."""
    too_large: int | None
    """The smallest batch size that did not fit; None: the whole dataset fits."""

    def __str__(self) -> str:
        name = plan_name(self.plan)
        if not self.batch:
            return f"largest batch of {name}: not even {self.too_large} fits"
        end = "all of the dataset" if self.too_large is None else f"{self.too_large} does not fit"
        return f"largest batch of {name}: {self.batch} ({end})"


def largest_batches(
    task: Task | type[Task] | str,
    plans: Sequence[AnyPlan],
    data: Path | str | None = None,
    fields: Mapping[str, object] | None = None,
    limit: int | None = None,
) -> Iterator[Largest]:
    """Finds the largest batch of each plan: by doubling until memory is exhausted, then by bisection.

    Args:
        limit: bytes of data that each process may have; None: on a CPU its share of the free memory, so that
            the system does not kill processes; on a GPU, its memory.

    Raises:
        GrappeError: a training fails for another reason than memory.
    """
    options = Options(steps=STEPS, steps_only=True)
    request = Request(task=TaskReference.of(task, fields), plan=Plan(), data=data_folder(data), options=options)
    resolved = request.task.resolve()
    prepare(resolved, request.data)
    samples = len(resolved.data("train", request.data))  # type: ignore[arg-type]
    with scratch("largest") as folder:
        for number, plan in enumerate(map(as_plan, plans)):
            training = dataclasses.replace(request, plan=plan)
            runs = functools.partial(_runs, training, folder / str(number), limit or _share(plan))
            fits, fails, batch = 0, None, min(samples, max(plan.data_parallel, resolved.batch_size))
            while fails is None and fits < samples:
                if runs(batch):
                    fits, batch = batch, min(samples, 2 * batch)
                else:
                    fails = batch
            least = 2 * plan.data_parallel
            while fails is not None and fails - fits > max(least, fails // EIGHTHS):
                batch = (fits + fails) // 2 // least * least or least
                if batch in (fits, fails):
                    break
                fits, fails = (batch, fails) if runs(batch) else (fits, batch)
            yield Largest(plan=str(plan), batch=fits, too_large=fails)


def _runs(training: Request, folder: Path, limit: int | None, batch: int) -> bool:
    """Returns whether a few steps of `batch` samples succeed."""
    sized = dataclasses.replace(training, task=training.task.with_batch(batch))
    try:
        short_training(sized, folder / str(batch), limit=limit)
    except GrappeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        return False
    return True


def _share(plan: Plan, meminfo: Path = memory.MEMINFO) -> int | None:
    """Returns each process's share of the host's free memory; None if the plan trains on a GPU."""
    import torch

    if plan.device == "cuda" or (plan.device == "auto" and torch.cuda.is_available()):
        return None
    free = memory.free(meminfo)
    return None if free is None else free // plan.processes
