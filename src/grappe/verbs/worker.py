"""Worker: one process of a training, from joining the others to leaving them."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import IO, Any

from grappe import engines, world
from grappe.checkpoint.keep import Keep
from grappe.checkpoint.saver import Saver
from grappe.child import early_log, end_now, redirect
from grappe.chronometer import Chronometer
from grappe.data import feed
from grappe.data.fingerprint import fingerprint
from grappe.engines.base import Engine, Setting
from grappe.interrupt import Interrupt
from grappe.outlet import outlet
from grappe.place import Place
from grappe.run import Run
from grappe.task import Task
from grappe.training import Training
from grappe.verbs.opening import Opened, Wanted, open_run
from grappe.verbs.out_of_memory import explained
from grappe.verbs.session import blaming, user_call
from grappe.verbs.train import Request, Result
from grappe.watchdog import Watchdog
from grappe.watchers.base import Watcher
from grappe.watchers.console import Console
from grappe.watchers.curves import Curves
from grappe.watchers.logger import find as find_logger
from grappe.watchers.meter import Meter, used
from grappe.watchers.profile import Profile
from grappe.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a training is put together from."""

    asked: Request
    task: Task
    train_data: Any
    held_out: Any
    here: World
    opened: Opened
    engine: type[Engine]
    interrupt: Interrupt
    watchdog: Watchdog
    terminal: IO[str] | None
    chronometer: Chronometer
    meter: Meter


def worker(asked: Request, place: Place, meet: Path) -> Result:
    """One process of a training. Collective."""
    began = time.perf_counter()
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
        memory_told = explained(task, asked.plan, place.rank)
        with blaming(task), memory_told, Chronometer(here.device, began) as chronometer:
            parts = Parts(
                asked=asked,
                task=task,
                train_data=train_data,
                held_out=held_out,
                here=here,
                opened=opened,
                engine=engine,
                interrupt=interrupt,
                watchdog=_watchdog(asked, place, meet, here, opened),
                terminal=terminal,
                chronometer=chronometer,
                meter=Meter(here, asked.plan.per_device, began),
            )
            training = _assemble(parts)
            outcome = training.run_to_end()
        _close(training, opened.run, outcome, here, parts.meter)
    finally:
        if opened.lease is not None:
            opened.lease.release()
    here.leave()
    return Result(run=opened.run.folder, status=outcome.status, step=outcome.step)


def _watchdog(asked: Request, place: Place, meet: Path, here: World, opened: Opened) -> Watchdog:
    return Watchdog(
        rank=here.rank,
        size=here.size,
        folder=opened.run.folder / "logs",
        token=opened.token,
        limit=asked.options.stall_limit,
        end=functools.partial(end_now, meet, place),
    )


def _opened(asked: Request, task: Task, train_data: Any, here: World) -> Opened:
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
    dataset = user_call(task, "data", split, folder)
    feed.check(dataset, split, task)
    return dataset


def _assemble(parts: Parts) -> Training:
    asked, here, opened = parts.asked, parts.here, parts.opened
    training_feed = feed.training_feed(parts.task, parts.train_data, asked.plan, here)
    training_feed.phase = parts.chronometer.switch
    total = parts.task.epochs * training_feed.ledger.steps_per_epoch
    if asked.options.bare:
        total = max(total, asked.options.steps or 0)
    if parts.terminal is not None:
        _announce(parts)
    may_commit = opened.lease.check if opened.lease is not None else _nothing
    training = Training(
        engine=parts.engine(_setting(parts, training_feed, total)),
        engine_name=asked.plan.engine,
        world=here,
        run=opened.run,
        saver=Saver(opened.run.checkpoints, here, opened.token, Keep(last=asked.options.keep), may_commit),
        options=asked.options,
        feed=training_feed,
        validation=feed.evaluation_feed(parts.task, parts.held_out, asked.plan, here),
        total_steps=total,
        watchers=_watchers(parts),
        interrupt=parts.interrupt,
        watchdog=parts.watchdog,
        chronometer=parts.chronometer,
    )
    if opened.checkpoint.step:
        training.resume(opened.checkpoint)
    return training


def _setting(parts: Parts, training_feed: feed.Feed, total: int) -> Setting:
    return Setting(
        task=parts.chronometer.watch(parts.task, parts.asked.plan, parts.engine.waits()),
        plan=parts.asked.plan,
        world=parts.here,
        weights=parts.opened.checkpoint.model,
        total_steps=total,
        flag=parts.interrupt.flag,
        phase=parts.chronometer.tell,
        example=training_feed.example(),
        samples=len(parts.train_data),
    )


def _watchers(parts: Parts) -> list[Watcher]:
    """Process 0 tells the user and the loggers; every process is measured."""
    asked, found = parts.asked, list[Watcher]()
    if parts.here.rank == 0:
        found.append(Curves())
        if parts.terminal is not None:
            found.append(Console(parts.terminal, _samples_word(parts.train_data)))
        found += [find_logger(name)() for name in asked.options.log]
    found.append(parts.meter)
    if parts.here.rank in asked.options.profile:
        found.append(Profile(parts.here.rank, asked.options.profile_steps, parts.terminal))
    return [*found, *asked.also]


def _nothing() -> None:
    """Processes other than 0 commit nothing."""


def _announce(parts: Parts) -> None:
    asked, task, here = parts.asked, parts.task, parts.here
    assert parts.terminal is not None
    slices = here.data_size
    micro = asked.plan.microbatches
    each = -(-task.batch_size // slices)
    sizes = f"batch {task.batch_size} over all processes"
    if slices > 1 or micro > 1:
        sizes += f" = {slices} x {each}" + (f", each in {micro} microbatches" if micro > 1 else "")
    parts.terminal.write(
        f"{type(task).__name__} on {here.size} process{'es' if here.size > 1 else ''} ({here.device.type}, "
        f"{here.threads} thread{'s' if here.threads > 1 else ''} each), plan: {asked.plan or 'one process'}\n"
        f"{len(parts.train_data):,} training samples, {sizes}; run {parts.opened.run.folder}\n"
        + "".join(f"{note}\n" for note in parts.opened.notes)
    )
    parts.terminal.flush()


def _samples_word(dataset: Any) -> str:
    inputs = dataset[0][0]
    return "images" if getattr(inputs, "ndim", 0) == 3 and inputs.shape[0] in (1, 3) else "samples"
