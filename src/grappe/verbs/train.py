"""grappe train: trains a task under a plan, or goes on with a run."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from grappe.errors import UsageError
from grappe.place import Place
from grappe.plan import Plan, as_plan
from grappe.run import Run
from grappe.task import Task
from grappe.training import Options, Training
from grappe.verbs.session import TaskReference, blaming, start, user_call
from grappe.watchers.base import Watcher
from grappe.watchers.logger import check as check_logger
from grappe.world import World

if TYPE_CHECKING:
    from grappe.chronometer import Chronometer
    from grappe.watchers.meter import Meter

DATA_FOLDER = "GRAPPE_DATA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the processes of a training are told."""

    task: TaskReference
    plan: Plan
    run: Path | None
    base: Path
    data: Path
    weights: Path | None
    options: Options
    quiet: bool = False
    """Whether to tell the user nothing but errors."""
    also: tuple[Watcher, ...] = ()
    """Further watchers, on every process; they travel by value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a training ended."""

    run: Path
    status: str
    step: int


def train(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    *,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
) -> Run:
    """Trains `task` under `plan`, or goes on with the run in `folder`.

    Args:
        task: a task, its class, or its name as on the command line.
        plan: a Plan or its text, "replicate=2"; "" is one process.
        folder: the run's folder; None makes a new one under `base`.
        data: where datasets are; None: the environment's GRAPPE_DATA, or ./data.
        fields: texts for the task's fields, when it is given by name.
        weights: a run or a safetensors file to start from.

    Raises:
        GrappeError: something is wrong with what was asked; the message says what to do.
    """
    return Run(run_training(request(task, plan, folder, data, fields, weights, options, base)).run)


def request(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
) -> Request:
    """A Request with every default filled in."""
    return Request(
        task=TaskReference.of(task, fields),
        plan=as_plan(plan),
        run=Path(folder) if folder else None,
        base=Path(base),
        data=data_folder(data),
        weights=Path(weights) if weights else None,
        options=options or Options(),
    )


def data_folder(data: Path | str | None) -> Path:
    """Where datasets are: `data`, the environment's GRAPPE_DATA, or ./data."""
    return Path(data or os.environ.get(DATA_FOLDER, "data"))


def run_training(asked: Request) -> Result:
    """Trains on the plan's processes, started here or by torchrun or srun."""
    for rank in asked.options.profile:
        if rank >= asked.plan.processes:
            raise UsageError(f"--profile={rank}: there are process 0 to {asked.plan.processes - 1}")
    for name in asked.options.log:
        check_logger(name)
    if asked.run is not None and Run.is_run(asked.run) and Run(asked.run).finished:
        finished = Run(asked.run)
        if not asked.options.steps:
            return Result(
                run=finished.folder, status="finished before", step=finished.description.get("step", 0)
            )
    return start("grappe.verbs.train:worker", asked, asked.plan, saves=True)


def worker(asked: Request, place: Place, meet: Path) -> Result:
    """One process of a training. Collective."""
    began = time.perf_counter()
    from grappe import engines, world
    from grappe.child import early_log, redirect
    from grappe.chronometer import Chronometer
    from grappe.interrupt import Interrupt
    from grappe.outlet import outlet
    from grappe.verbs.out_of_memory import explained
    from grappe.watchers.meter import Meter

    terminal = None if asked.quiet else outlet(place)
    here = world.join(asked.plan, place, meet)
    interrupt = Interrupt(asked.options.time_limit)
    interrupt.install()  # not while the others are waited for: there is nothing to save yet
    engine = engines.check(asked.plan)
    task = asked.task.resolve()
    train_data, held_out = (_dataset(task, split, asked.data) for split in ("train", "validation"))
    opened = _opened(asked, task, train_data, here)
    try:
        if place.launcher == "grappe":
            redirect(opened.run.folder / "logs" / f"rank-{place.rank}.log", place, early_log(meet, place))
        watchdog = _watchdog(asked, place, meet, here, opened)
        memory_told = explained(task, asked.plan, place.rank)
        with blaming(task), memory_told, Chronometer(here.device, began) as chronometer:
            meter = Meter(here, asked.plan.per_device, began)
            training = _assemble(
                asked,
                task,
                (train_data, held_out),
                here,
                opened,
                engine,
                interrupt,
                watchdog,
                terminal,
                chronometer,
                meter,
            )
            outcome = training.run_to_end()
        _close(training, opened.run, outcome, here, meter)
    finally:
        if opened.lease is not None:
            opened.lease.release()
    here.leave()
    return Result(run=opened.run.folder, status=outcome.status, step=outcome.step)


def _watchdog(asked: Request, place: Place, meet: Path, here: World, opened: Any) -> Any:
    from grappe.child import end_now
    from grappe.watchdog import Watchdog

    return Watchdog(
        rank=here.rank,
        size=here.size,
        folder=opened.run.folder / "logs",
        token=opened.token,
        limit=asked.options.stall_limit,
        end=functools.partial(end_now, meet, place),
    )


def _opened(asked: Request, task: Task, train_data: Any, here: World) -> Any:
    from grappe.data.fingerprint import fingerprint
    from grappe.verbs.opening import Wanted, open_run

    with blaming(task):
        dataset = fingerprint(train_data) if here.rank == 0 else ""
    wanted = Wanted(
        name=asked.task.name,
        task=task,
        plan=str(asked.plan),
        folder=asked.run,
        base=asked.base,
        data=asked.data,
        weights=asked.weights,
        dataset=dataset,
    )
    return open_run(wanted, here)


def _close(training: Training, run: Run, outcome: Any, here: World, meter: Meter) -> None:
    from grappe.watchers.meter import used

    usages = here.gather(meter.usage())
    if here.rank == 0:
        costs = [dataclasses.asdict(one) for one in usages]
        told = used(usages, run.description.get("used", {}))
        run.describe(step=outcome.step, status=outcome.status, used=told, costs=costs)
        if outcome.status in ("finished", "stopped"):
            run.finish()
    training.engine.close()
    here.barrier()


def _dataset(task: Task, split: str, folder: Path) -> Any:
    from grappe.data import feed

    dataset = user_call(task, "data", split, folder)
    feed.check(dataset, split, task)
    return dataset


def _assemble(
    asked: Request,
    task: Task,
    datasets: tuple[Any, Any],
    here: World,
    opened: Any,
    engine: Any,
    interrupt: Any,
    watchdog: Any,
    terminal: IO[str] | None,
    chronometer: Chronometer,
    meter: Meter,
) -> Training:
    from grappe.checkpoint.keep import Keep
    from grappe.checkpoint.saver import Saver
    from grappe.data import feed
    from grappe.engines.base import Setting
    from grappe.watchers.console import Console
    from grappe.watchers.curves import Curves
    from grappe.watchers.logger import find as find_logger

    training_feed = feed.training_feed(task, datasets[0], asked.plan, here)
    validation = feed.evaluation_feed(task, datasets[1], asked.plan, here)
    total = task.epochs * training_feed.ledger.steps_per_epoch
    if asked.options.bare:
        total = max(total, asked.options.steps or 0)
    if terminal is not None:
        _announce(terminal, asked, task, here, opened, len(datasets[0]))
    training_feed.phase = chronometer.switch
    setting = Setting(
        task=chronometer.watch(task, asked.plan, engine.waits()),
        plan=asked.plan,
        world=here,
        weights=opened.checkpoint.model,
        total_steps=total,
        flag=interrupt.flag,
        phase=chronometer.tell,
        example=training_feed.example(),
        samples=len(datasets[0]),
    )
    may_commit = opened.lease.check if opened.lease is not None else _nothing
    keep = Keep(last=asked.options.keep)
    loggers = [find_logger(name)() for name in asked.options.log]
    watchers = [Curves(), *([Console(terminal, _samples_word(datasets[0]))] if terminal else []), *loggers]
    training = Training(
        engine=engine(setting),
        engine_name=asked.plan.engine,
        world=here,
        run=opened.run,
        saver=Saver(opened.run.checkpoints, here, opened.token, keep, may_commit),
        options=asked.options,
        feed=training_feed,
        validation=validation,
        total_steps=total,
        watchers=[
            *(watchers if here.rank == 0 else []),
            meter,
            *_profile(asked, here, terminal),
            *asked.also,
        ],
        interrupt=interrupt,
        watchdog=watchdog,
        chronometer=chronometer,
    )
    if opened.checkpoint.step:
        training.resume(opened.checkpoint)
    return training


def _profile(asked: Request, here: World, terminal: IO[str] | None) -> list[Watcher]:
    from grappe.watchers.profile import Profile

    if here.rank not in asked.options.profile:
        return []
    return [Profile(here.rank, asked.options.profile_steps, terminal)]


def _nothing() -> None:
    """Processes other than 0 commit nothing."""


def _announce(terminal: IO[str], asked: Request, task: Task, here: World, opened: Any, samples: int) -> None:
    slices = here.data_size
    micro = asked.plan.microbatches
    each = -(-task.batch_size // slices)
    sizes = f"batch {task.batch_size} over all processes"
    if slices > 1 or micro > 1:
        sizes += f" = {slices} x {each}" + (f", each in {micro} microbatches" if micro > 1 else "")
    terminal.write(
        f"{type(task).__name__} on {here.size} process{'es' if here.size > 1 else ''} ({here.device.type}, "
        f"{here.threads} thread{'s' if here.threads > 1 else ''} each), plan: {asked.plan or 'one process'}\n"
        f"{samples:,} training samples, {sizes}; run {opened.run.folder}\n"
        + "".join(f"{note}\n" for note in opened.notes)
    )
    terminal.flush()


def _samples_word(dataset: Any) -> str:
    inputs = dataset[0][0]
    return "images" if getattr(inputs, "ndim", 0) == 3 and inputs.shape[0] in (1, 3) else "samples"
