"""Worker: one process of a training, from joining the process group to leaving it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grappe import engines
from grappe.checkpoint.format import Retention
from grappe.checkpoint.saver import Saver
from grappe.checkpoint.weights import ModelWeights
from grappe.data import loader
from grappe.data.batch import inside
from grappe.data.corpus.mixture import drawn_from
from grappe.data.datasets import dataset_of, prepare, refuse_differing_classes, refuse_differing_lengths
from grappe.data.source import explaining_ended_workers
from grappe.data.stream import POSITION, Stream
from grappe.engines.base import EngineSetup
from grappe.engines.shared.carried import CarriedState
from grappe.errors import OutOfMemory
from grappe.errors.user_code import naming_user_line
from grappe.launch.child import doubt, early_log, end_now, redirect
from grappe.launch.imports import import_quietly, without_collection
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import StopSignal
from grappe.launch.terminal import UserStream, user_stream
from grappe.launch.world import World, join
from grappe.plan import Plan
from grappe.profiling.chronometer import Chronometer, waits_counted
from grappe.profiling.memory import keep_freed_memory, resident
from grappe.step.cross_check import sum_of_bits
from grappe.step.noise_scale import NoiseScale
from grappe.step.noise_scale import refuse as refuse_noise_scale
from grappe.step.observers import Observers
from grappe.step.scores import TrainingScores
from grappe.step.task_contract import metrics_of
from grappe.task import Task, overrides
from grappe.training.bottleneck import BottleneckMeter
from grappe.training.checked_steps import CheckedSteps, can_be_checked
from grappe.training.headspace import headspace
from grappe.training.loop import Training, WeightAverage, naming_overwritten
from grappe.training.memory_choice import with_memory_chosen
from grappe.training.options import Options
from grappe.training.out_of_memory import LocalOutOfMemory, reporting_out_of_memory, with_plan_that_fits
from grappe.training.reporting import announce, note_optimizer, report, reporting, start_facts, unit_facts
from grappe.training.request import Request, Result, make_watchers
from grappe.training.run import Run
from grappe.training.start_run import Data, StartedRun, start_run
from grappe.training.task_reference import TaskReference
from grappe.training.watchdog import Watchdog, watch_idle
from grappe.training.watchers.base import ClockWatcher, Outcome, RunInfo, Watcher
from grappe.training.watchers.curves import NoiseWatcher, SampleLog
from grappe.training.watchers.meter import Meter, slow_node, used
from grappe.training.watchers.watcher_list import WatcherList, gradients_hooked

SLOW_IMPORT = 3.0  # seconds, from which on a start says what it waited for


def worker(request: Request, process: ProcessRank, rendezvous_folder: Path) -> Result:
    """Runs one process of a training. Collective.

    Raises:
        OutOfMemory: memory ran out; the message has a plan that is foreseen to fit.
    """
    try:
        return _trained(request, process, rendezvous_folder)
    except LocalOutOfMemory as error:
        shortage = error
    if request.options.steps_only:  # a measurement, which tries what fits
        raise OutOfMemory(str(shortage))
    # Outside `except`, so that no traceback keeps the training's tensors alive.
    raise with_plan_that_fits(shortage, request.task.resolve(), request.plan, request.data) from None


def _trained(request: Request, process: ProcessRank, rendezvous_folder: Path) -> Result:
    began = time.perf_counter()
    plan, options = request.plan, request.options
    terminal = None if request.quiet else user_stream(process)

    world = _joined(request, process, rendezvous_folder, terminal)
    stop_signal = StopSignal(options.time_limit)
    stop_signal.install()  # not while this process waits for the others: there is nothing to save yet
    engine_class, (task, notes) = engines.check(plan), _imported(request.task)
    if options.noise_scale:
        refuse_noise_scale(task, plan)
    own_watchers = make_watchers(request.watchers) if request.watchers and world.rank == 0 else []
    prepare(task, request.data, world)
    data = read(task, request.data, world, options.steps)
    if not options.steps_only and overrides(task, "metrics"):
        import_quietly("torchmetrics")  # 145 MB that do not belong to a model
    baseline = resident()  # before memory= looks at what is left
    request, plan, world = _with_memory_chosen(request, world, rendezvous_folder)

    with start_run(request, task, data, world) as started:
        if process.launcher == "grappe":
            log = started.run.folder / "logs" / f"rank-{process.rank}.log"
            redirect(log, process, early_log(rendezvous_folder, process))
        clock = Chronometer(world.device, began, data_parallel=plan.data_parallel == world.size > 1)
        with (
            naming_user_line(task),
            reporting_out_of_memory(process.rank) as library_memory,
            clock,
            waits_counted(clock),
            inside(None),
            loaders(task, data, plan, world, started, None if options.steps_only else clock) as (batches, validation),
        ):
            info = _run_info(request, task, batches, started, world)
            if terminal is not None:
                announce(terminal, task, info, plan, (*started.notes, *batches.notes, *notes), world)

            batches.phase = clock.switch
            tensors = started.checkpoint.read_tensors()
            average, carried, example = WeightAverage(task.ema), CarriedState(), batches.example()
            _set_heap_limits(plan, options)
            facts = start_facts(world, info, plan, loading=batches.loading, tensors=tensors, example=example)
            training_scores = TrainingScores(task, world, metrics=options.training_metrics)
            noise = None
            if options.noise_scale and not world.rank:  # one process's slices suffice for the estimate
                noise = NoiseScale(
                    data_size=world.data_size,
                    batch_size=info.batch_size,
                    short_step=info.steps_per_epoch - 1 if info.samples % info.batch_size else None,
                    steps_per_epoch=info.steps_per_epoch,
                    start=info.start,
                )
            check = (
                CheckedSteps(task, plan, world, batches, carried, name=info.task, resident=baseline, example=example)
                if can_be_checked(options, plan, batches)
                else None
            )
            hooks = [each for each in (noise, check) if each is not None]
            engine = engine_class(
                setup := EngineSetup(
                    task=task,
                    plan=plan,
                    world=world,
                    weights=ModelWeights(tensors),
                    total_steps=info.total_steps,
                    stop=stop_signal,
                    observers=Observers(
                        phase=[clock.switch, *(each.on_phase for each in hooks)],
                        optimizer=[
                            clock.on_optimizer,
                            average.watch,
                            functools.partial(note_optimizer, facts),
                            *(each.on_optimizer for each in hooks),
                        ],
                        output=[
                            *([training_scores.add] if training_scores.of_outputs else ()),
                            *([noise.on_output] if noise else ()),
                        ],
                        named_losses=[] if training_scores.of_outputs else [training_scores.add],
                    ),
                    sample_inputs=example,
                    samples=info.samples,
                    kept_blocks=started.description.get("start", {}).get("units", ()),
                    carried=carried,
                )
            )
            report(facts | unit_facts(engine_class, setup) | {"stream": batches.notes}, started.run, terminal, world)

            meter = Meter(
                world,
                clock,
                per_device=plan.per_device,
                began=began,
                baseline=baseline,
                loading=lambda: batches.loading,
            )
            sample_log = SampleLog() if options.log_samples else None
            watchers = WatcherList(
                [
                    *reporting(request, terminal, data.train, world, info, stop_signal.deadline),
                    *([NoiseWatcher(noise, terminal)] if noise is not None else []),
                    meter,
                    *([] if sample_log is None else [sample_log]),
                    *own_watchers,
                    *_with_clock(request.per_process_watchers, clock),
                ]
            )
            training = Training(
                task=task,
                options=options,
                info=info,
                world=world,
                engine=engine,
                batches=batches,
                validation=validation,
                sample_log=sample_log,
                clock=clock,
                watchers=watchers,
                watchdog=Watchdog(
                    rank=world.rank,
                    size=world.size,
                    folder=info.folder / "logs",
                    token=started.token,
                    limit=options.stall_limit,
                    end=functools.partial(end_now, rendezvous_folder, process),
                    phase=lambda: clock.phase,
                    writing=lambda: terminal is not None and terminal.writing,
                ),
                stop_signal=stop_signal,
                saver=Saver(
                    started.run.checkpoints,
                    world,
                    started.token,
                    Retention(last=options.keep),
                    started.check_lease,
                    run=info.description.get("id", ""),
                    bits=sum_of_bits if plan.check else None,
                ),
                average=average,
                carried=carried,
                stream=batches.stream,
                training_scores=training_scores,
                loading_cost=lambda timing: headspace(
                    timing, (batches, validation), world, tuned=batches.loads and batches.sources.tuned
                ),
                meter=BottleneckMeter(clock, world, meter.usage),
                check=check,
                first_use=library_memory,
            )
            if info.start:
                training.resume(started.checkpoint, tensors)
            with gradients_hooked(watchers, lambda: training.step, clock), naming_overwritten(task, batches, plan):
                outcome = training.run()

        _write_outcome(started.run, outcome, training, meter)
        engine.close()
        world.barrier()
    world.leave()
    return Result(run=info.folder, status=outcome.status, step=outcome.step)


def _joined(request: Request, process: ProcessRank, folder: Path, terminal: UserStream | None) -> World:
    world = join(request.plan, process, folder)
    if request.options.idle:
        watch_idle(request.options.idle, process, folder, token=world.share(secrets.token_hex(8)), terminal=terminal)
    return world


def _imported(reference: TaskReference) -> tuple[Task, list[str]]:
    """Imports and makes the task; returns it with a note, if what its file imports took long."""
    began = time.perf_counter()
    with without_collection():
        task = reference.resolve()
    seconds = time.perf_counter() - began
    return task, [f"importing what the task's file needs took {seconds:.1f} s"] if seconds > SLOW_IMPORT else []


def _with_memory_chosen(request: Request, world: World, rendezvous_folder: Path) -> tuple[Request, Plan, World]:
    chosen = with_memory_chosen(request, world)
    if world.size == 1 and chosen.plan.offload != request.plan.offload:
        world = join(chosen.plan, world.process, rendezvous_folder)  # with the group that FSDP2 needs
    return chosen, chosen.plan, world


def _set_heap_limits(plan: Plan, options: Options) -> None:
    """Sets glibc's limits as the first evaluation of a training does, if there is none: steps would be slower."""
    if options.steps_only and not plan.saves_memory:
        with keep_freed_memory():
            pass


def _with_clock(watchers: tuple[Watcher, ...], clock: Chronometer) -> tuple[Watcher, ...]:
    for watcher in watchers:
        if isinstance(watcher, ClockWatcher):
            watcher.chronometer = clock
    return watchers


def read(task: Task, folder: Path, world: World, steps: int | None) -> Data:
    """Makes the task's datasets, and the order of its training samples. Collective.

    Args:
        steps: of the training, where a stream of unknown length needs them.
    """
    train = dataset_of(task, "train", folder)
    validation = dataset_of(task, "validation", folder, train)
    if isinstance(train, Stream) and train.endless and steps is not None:
        train.samples = -(-steps // task.epochs) * task.batch_size
    refuse_differing_classes(train, validation)
    refuse_differing_lengths(world, {"training": len(train), "validation": len(validation)})
    with naming_user_line(task):
        order = loader.training_order(task, train)
    return Data(train=train, validation=validation, order=order)


@contextlib.contextmanager
def loaders(
    task: Task, data: Data, plan: Plan, world: World, started: StartedRun, chronometer: Chronometer | None
) -> Iterator[tuple[loader.BatchLoader, loader.BatchLoader]]:
    """Context with the loaders of training and validation; without a chronometer nothing is tried out in the steps."""
    batches = loader.training_loader(task, data.train, plan, world, data.order)
    if batches.stream is not None:
        batches.begin_stream(started.checkpoint.step, started.checkpoint.read_values().get(POSITION))
    validation = loader.evaluation_loader(task, data.validation, plan, world)

    def chosen(loading: Mapping[str, Any]) -> None:
        if world.rank == 0:
            started.check_lease()
            with contextlib.suppress(OSError):  # a full disk is reported by the next checkpoint
                started.run.describe(loading=dict(loading))

    sources = [each.sources for each in (batches, validation) if each.loads]
    if chronometer is not None and batches.loads:
        sources[0].tune(chronometer.spent, started.description.get("loading"), chosen)
        for others in sources[1:]:
            others.like = sources[0]
    try:
        with explaining_ended_workers() if sources else contextlib.nullcontext():
            yield batches, validation
    finally:
        for each in (*sources, *([] if batches.stream is None else [batches.stream])):
            each.close()


def _run_info(request: Request, task: Task, batches: loader.BatchLoader, started: StartedRun, world: World) -> RunInfo:
    order, options = batches.order, request.options
    total = task.epochs * order.steps_per_epoch
    if options.steps_only:
        total = max(total, options.steps or 0)
    elif isinstance(batches.dataset, Stream) and batches.dataset.endless:
        total = min(total, options.steps or total)
    return RunInfo(
        folder=started.run.folder,
        task=request.task.name,
        plan=str(request.plan),
        engine=request.plan.engine,
        rank=world.rank,
        world_size=world.size,
        device=world.device.type,
        start=started.checkpoint.step,
        last_step=options.last_step(total),
        total_steps=total,
        steps_per_epoch=order.steps_per_epoch,
        batch_size=order.batch_size,
        samples=order.length,
        description=started.description,
    )


def _write_outcome(run: Run, outcome: Outcome, training: Training, meter: Meter) -> None:
    """Writes the training's outcome and its use of resources to run.json. Collective."""
    world, check = training.world, training.check
    usages = world.gather(meter.usage())
    if world.rank == 0:
        if world.data_size == world.size:  # of equal work alone
            for node, evidence in slow_node(usages).items():
                doubt(node, evidence, "training")
        costs = [dataclasses.asdict(usage) for usage in usages]
        metrics = {} if outcome.scores is None else metrics_of(training.task)
        run.describe_drawn(functools.partial(drawn_from, training.batches.order), 0, outcome.step)
        before = run.read_description()
        so_far, checked = used(usages, before.get("used", {})), before.get("checked", {})
        run.describe(
            step=outcome.step,
            total_steps=training.info.total_steps,
            status=outcome.status,
            used=so_far,
            costs=costs,
            headspace=outcome.headspace.as_json(),
            bottleneck=outcome.bottleneck,
            checked=checked | ({} if check is None else {str(step + 1): gap for step, gap in check.distances.items()}),
            lower_is_better=[name for name, metric in metrics.items() if metric.higher_is_better is False],
        )
        if outcome.status in ("finished", "stopped"):
            run.finish()
