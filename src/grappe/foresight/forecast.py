"""Forecast: what a process of a plan needs, composed from what the plain model needs: states, peaks, copies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from grappe.errors import PlanError, ProcessDied
from grappe.errors.user_code import naming_user_line
from grappe.foresight.fake_model import FakeModel, fake_group_possible, slices_of
from grappe.foresight.kernels import Call
from grappe.foresight.memory import (
    GLOO,
    GLOO_LATE,
    NCCL,
    UNKNOWN,
    CommunicationBuffers,
    DdpMemory,
    FsdpMemory,
    Parameter,
    ParameterShard,
    Peaks,
    PlanMemory,
    States,
    peak,
    rows_of,
    states,
)
from grappe.foresight.partition import (
    RANDOM_STATE,
    cut_of,
    evaluated_rows,
    first_parameters,
    kept,
    largest_rows,
    precision_of,
    processes,
    random_states,
    stage_buffers,
    threads_of,
    traced_passes,
    traced_plan,
)  # fmt: skip
from grappe.foresight.schedules import order_of
from grappe.foresight.trace import REDUCE, START, Mark, Trace
from grappe.launch.fork import run_in_fork
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.parallel.materialise import untied
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.pipeline.units import pipeline_units
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan
from grappe.profiling.memory import data_size, return_freed_memory
from grappe.step.scores import bytes_kept

Calls = tuple[tuple[Call, ...], tuple[Call, ...]]
"""The distinct calls of an evaluation and of a step, of one process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryMemory:
    """Bytes that libraries keep in one process."""

    evaluation: int = 0
    """From the first evaluation on."""
    step: int = 0
    """From the first step on, besides."""

    @property
    def total(self) -> int:
        """Sums both."""
        return self.evaluation + self.step


NOTHING_KEPT = LibraryMemory()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptRequest:
    """The calls of each process that differs, on their way to the process that runs them."""

    calls: tuple[Calls, ...]
    threads: int


def library_memory(fake_model: FakeModel, plan: Plan, samples: int) -> LibraryMemory | None:
    """Measures what libraries keep in the process of a plan in which they keep most, at `samples` samples a step.

    Each distinct kernel is run once, in a process of its own, where freed memory goes back at once. None: that process
    got no memory, or the fake model has no kernels.
    """
    if not fake_model.runs_kernels:
        return None
    traces = (_pipeline_traces if plan.pipeline > 1 else _step_traces)(fake_model, plan, samples)
    calls = tuple((_distinct_calls(evaluated), _distinct_calls([step])) for evaluated, step in traces)
    try:
        memories = _measured(tuple(dict.fromkeys(calls)), threads_of(plan))
    except ProcessDied:
        return None
    return max(memories, key=lambda memory: memory.total)


def _distinct_calls(traces: Sequence[Trace]) -> tuple[Call, ...]:
    calls = dict.fromkeys(call for trace in traces for _, _, call in trace.calls)
    return tuple(call for call in calls if not call.too_large)


@functools.lru_cache(maxsize=64)
def _measured(calls: tuple[Calls, ...], threads: int) -> list[LibraryMemory]:
    request = KeptRequest(calls=calls, threads=threads)
    return local("grappe.foresight.forecast:worker", request, 1, from_training=True)


def worker(request: KeptRequest, process: ProcessRank, rendezvous_folder: Path) -> list[LibraryMemory]:
    """Runs the calls of each process in a fork of this one, whose libraries keep nothing yet."""
    memories = []
    for evaluation, step in request.calls:
        text = run_in_fork(functools.partial(_kept, evaluation, step, request.threads))
        after_evaluation, after_step = map(int, text.split())
        memories.append(LibraryMemory(evaluation=after_evaluation, step=after_step))
    return memories


def _kept(evaluation: Iterable[Call], step: Iterable[Call], threads: int) -> str:
    """Runs the calls; returns the bytes that stay after the evaluation's, and those that the step's add."""
    return_freed_memory()
    torch.set_num_threads(threads)
    start = data_size()
    torch.ones(
        threads << 16
    ).exp_()  # starts all threads: an evaluation has operators that no library computes
    _run(evaluation)
    between = data_size()
    _run(step)
    return f"{max(0, between - start)} {max(0, data_size() - between)}"


@torch.no_grad()
def _run(calls: Iterable[Call]) -> None:
    for call in calls:
        with contextlib.suppress(
            RuntimeError
        ):  # in bf16 fake tensors may have a type that kernels do not take
            call.on_ones()()


class BalancedWriters:
    """Processes that hold the same tensors, and write them by turns: each goes to the one with the fewest bytes so far.

    As grappe.checkpoint.saver chooses them, which counts a byte more for each tensor.
    """

    def __init__(self, processes: int) -> None:
        self._loads = [(0, number) for number in range(processes)]
        self.copied = [0] * processes
        """Bytes of each process's copies."""

    def add(self, size: int, copied: int) -> None:
        """Adds a tensor of `whole` bytes, of which a process has `mine`."""
        load, number = self._loads[0]
        heapq.heapreplace(self._loads, (load + size + 1, number))
        self.copied[number] += copied


def copied(fake_model: FakeModel, plan: Plan) -> int:
    """Computes the bytes of the process that copies most; of a plan that is replicated and sharded at most."""
    split, unsplit = BalancedWriters(plan.replicate), BalancedWriters(plan.replicate * plan.shard)
    for parameter in fake_model.parameters:
        for size in parameter.states:
            _add(parameter, size, plan.shard, split, unsplit)
        for size in parameter.whole_states:
            unsplit.add(size, size)
    averages = [
        parameter
        for parameter in fake_model.parameters
        if parameter.trained and fake_model.task.ema is not None
    ]
    for parameter in [*fake_model.parameters, *averages]:
        _add(parameter, parameter.size, plan.shard, split, unsplit)
    if plan.shard == 1:
        return max(unsplit.copied) + fake_model.buffers
    return max(split.copied) + max(unsplit.copied) + fake_model.buffers


def _add(
    parameter: Parameter, size: int, ways: int, split: BalancedWriters, unsplit: BalancedWriters
) -> None:
    """Adds a tensor of `size` bytes that is split as the parameter is."""
    if ways == 1 or not parameter.shape:
        unsplit.add(size, size)
    else:
        split.add(size, size * rows_of(parameter, ways, 0) // max(1, parameter.shape[0]))


def _step_peaks(fake_model: FakeModel, plan: Plan, samples: int, copies: CommunicationBuffers) -> Peaks:
    """Computes the peaks of the process that needs most, at `samples` samples a step."""
    return Peaks(
        step=_step_peak(fake_model, plan, samples, copies),
        evaluation=_evaluation_peak(fake_model, plan, samples, copies),
    )


def _step_traces(fake_model: FakeModel, plan: Plan, samples: int) -> list[tuple[tuple[Trace, ...], Trace]]:
    """Returns the traces of an evaluation and of a step, of each process that differs from others: of one."""
    return [((_evaluated(fake_model, plan, samples),), _trained(fake_model, plan, samples))]


def _step_peak(fake_model: FakeModel, plan: Plan, samples: int, copies: CommunicationBuffers) -> int | None:
    """Computes the most bytes in a step, of a process with the longest rows; None: not known."""
    trace = _trained(fake_model, plan, samples)
    if not trace.complete:
        return None
    parts, own = _first_parts(fake_model, plan), first_parameters(fake_model, plan)
    marks, ahead = trace.marks[trace.ahead :], trace.marks[: trace.ahead]
    passes = [
        peak(marks, _overlay(own, plan, place, copies)) for place in _distinct_microbatches(plan.microbatches)
    ]
    passes.append(peak(ahead, _forward_only(own, plan, copies)) + RANDOM_STATE if ahead else 0)
    temporary = fake_model.together * max((part.temporary for part in parts), default=0)
    update = int(states(parts, 0).gradients + temporary)
    # The batch before is kept until its loss is read, one step late.
    return (
        kept(fake_model, plan, parts, own)
        + max(*passes, update)
        + random_states(fake_model, plan)
        + 2 * plan.microbatches * trace.batch
    )


def _evaluation_peak(
    fake_model: FakeModel, plan: Plan, samples: int, copies: CommunicationBuffers
) -> int | None:
    """Computes the most bytes in an evaluation between two steps; None: not known."""
    rows, trace = evaluated_rows(fake_model, plan, samples), _evaluated(fake_model, plan, samples)
    if not trace.complete:
        return None
    parts, own = _first_parts(fake_model, plan), first_parameters(fake_model, plan)
    # With zero=1 and 2, the second batch finds gathered what the first one has left.
    number = -(-fake_model.validation_samples // (rows * plan.data_parallel))
    most = peak(trace.marks * min(2, number), _forward_only(own, plan, copies))
    # The step before has its batch until its loss is read.
    batches = plan.microbatches * _trained(fake_model, plan, samples).batch + trace.batch
    return kept(fake_model, plan, parts, own) + most + batches + bytes_kept(number, trace.numbers)


def _trained(fake_model: FakeModel, plan: Plan, samples: int) -> Trace:
    """Returns the trace of a process's largest microbatch."""
    return fake_model.trace(
        largest_rows(fake_model, plan, samples),
        precision_of(plan),
        plan.recompute,
        threads_of(plan),
        plan.tensor,
        slices_of(fake_model.task, plan, samples, fake_model.samples),
    )


def _evaluated(fake_model: FakeModel, plan: Plan, samples: int) -> Trace:
    """Returns the trace of an evaluation's largest batch on one process."""
    # A loss of the whole batch takes an evaluation's batch whole, too.
    slices = slices_of(
        fake_model.task,
        dataclasses.replace(plan, microbatches=1, batchnorm="local"),
        samples,
        fake_model.validation_samples,
    )
    rows = evaluated_rows(fake_model, plan, samples)
    return fake_model.evaluation(rows, precision_of(plan), threads_of(plan), plan.tensor, slices)


def _first_parts(fake_model: FakeModel, plan: Plan) -> list[ParameterShard]:
    """Returns the parts of the process that has most."""
    return next(iter(processes(fake_model, plan)))


def _distinct_microbatches(microbatches: int) -> Sequence[tuple[bool, bool]]:
    """Returns the microbatches of a step that differ: is it the first, is it the last?"""
    first = [(True, microbatches == 1)]
    return first + [(False, False)] * (microbatches > 2) + [(False, True)] * (microbatches > 1)


def _forward_only(own: Sequence[Parameter], plan: Plan, copies: CommunicationBuffers) -> PlanMemory:
    """Returns what the plan takes in a forward without a backward: between two steps no gradient is there."""
    if uses_shard(plan):
        return FsdpMemory(own, plan.shard, plan.zero, there=False, reduces=False, copies=copies)
    buckets = sum(parameter.size for parameter in own if parameter.trained) if plan.replicate > 1 else 0
    return DdpMemory([], there=False, buckets=buckets)


def _overlay(
    own: Sequence[Parameter], plan: Plan, place: tuple[bool, bool], copies: CommunicationBuffers
) -> PlanMemory:
    first, last = place
    if uses_shard(plan):
        reduces = last or plan.zero != 1
        return FsdpMemory(own, plan.shard, plan.zero, there=not first, reduces=reduces, copies=copies)
    sizes = [parameter.size if parameter.trained else 0 for parameter in own]
    buckets = sum(sizes) if plan.replicate > 1 else 0
    return DdpMemory(sizes, there=not first, buckets=buckets, last=last)


def _pipeline_peaks(fake_model: FakeModel, plan: Plan, samples: int, copies: CommunicationBuffers) -> Peaks:
    """Computes the peaks of the process that needs most; of plans that do not split layers, without offload."""
    if plan.tensor > 1 or plan.offload != "none" or fake_model.task.whole_batch_loss:
        return UNKNOWN
    if uses_shard(plan) and _has_ties(fake_model):  # stages whose root gathers parameters, too
        return UNKNOWN
    made = _Pipeline(fake_model, plan, samples, copies)
    if not made.complete:
        return UNKNOWN
    places = range(plan.pipeline)
    return Peaks(
        step=max(made.step(place) for place in places),
        evaluation=max(made.evaluation(place) for place in places),
    )


def _has_ties(fake_model: FakeModel) -> bool:
    units = pipeline_units(fake_model.task, fake_model.plain)
    return len(untied(fake_model.plain, units)) < len(units)


def _pipeline_traces(
    fake_model: FakeModel, plan: Plan, samples: int
) -> list[tuple[tuple[Trace, ...], Trace]]:
    """Returns the traces of an evaluation, by stage, and of a step, of each of a pipeline's processes."""
    steps, scored = traced_passes(fake_model, plan, samples), _scored(fake_model, plan, samples)
    return [
        (tuple(scored[stage] for stage in _stages(plan, place)), step) for place, step in enumerate(steps)
    ]


def _scored(fake_model: FakeModel, plan: Plan, samples: int) -> tuple[Trace, ...]:
    rows = evaluated_rows(fake_model, plan, samples)
    return fake_model.evaluated_stages(traced_plan(plan), cut_of(fake_model, plan), rows, threads_of(plan))


def _stages(plan: Plan, place: int) -> range:
    return range(place, plan.pipeline * stages_each(plan), plan.pipeline)


class _Pipeline:
    """A pipeline's processes, by their place in it."""

    def __init__(self, fake_model: FakeModel, plan: Plan, samples: int, copies: CommunicationBuffers) -> None:
        self._sketch, self._plan, self._copies = fake_model, plan, copies
        self._cut = cut_of(fake_model, plan)
        self._rows = evaluated_rows(fake_model, plan, samples)
        self._steps = traced_passes(fake_model, plan, samples)
        self._scored = _scored(fake_model, plan, samples)
        everyone = list(processes(fake_model, plan))
        self._parts = everyone[:: len(everyone) // plan.pipeline]  # the first process of each shard axis
        self._buffers = stage_buffers(fake_model, plan)

    @property
    def complete(self) -> bool:
        """Returns whether what all kernels take is counted."""
        return all(trace.complete for trace in (*self._steps, *self._scored))

    def step(self, place: int) -> int:
        """Computes the most bytes of a process's passes, of the sum over replicas, and of the optimizer's step."""
        trace, parts, overlay = self._steps[place], self._parts[place], self._overlay(place)
        most = peak(trace.marks, overlay)
        after = trace.marks[-1].level + overlay.now
        summed = 0
        if self._plan.replicate > 1 and not uses_shard(self._plan):
            summed = states(parts, 0).gradients  # flat copies, all at once
        temporary = int(self._sketch.together * max((part.temporary for part in parts), default=0))
        # The batch before is kept until its loss is read, one step late.
        batches = 2 * self._plan.microbatches * trace.batch
        return (
            self._kept(place)
            + max(most, after + max(summed, temporary))
            + self._random_states(place)
            + batches
        )

    def evaluation(self, place: int) -> int:
        """Computes the most bytes of an evaluation on a process: of its stages, and of what it has sent."""
        plan, scored = self._plan, self._scored
        number = -(-self._sketch.validation_samples // (self._rows * plan.data_parallel))
        own = [scored[stage] for stage in _stages(plan, place)]
        sends = [trace for trace in own if trace is not scored[-1]]
        # What was sent is let go when as much more has been sent.
        waiting = min(number - 1, 2 * plan.pipeline) * max(
            (trace.boundaries[0] for trace in sends), default=0
        )
        # With zero=1 and 2, the second batch finds gathered what the first one has left.
        marks = [mark for trace in own for mark in trace.marks] * min(2, number)
        batches = plan.microbatches * self._steps[0].batch + min(number, plan.pipeline) * scored[0].batch
        most = peak(marks, self._overlay(place)) + sum(bytes_kept(number, trace.numbers) for trace in own)
        return self._kept(place) + self._received(place) + most + waiting + batches

    def _random_states(self, place: int) -> int:
        """Computes the bytes of the random states of units whose forward is to run again."""
        now = most = 0
        for kind, stage, _ in order_of(self._plan, place) if self._plan.recompute else ():
            now += len(self._cut[stage]) * (1 if kind == "forward" else -1)
            most = max(most, now)
        return RANDOM_STATE * most

    def _kept(self, place: int) -> int:
        parts = self._parts[place]
        return kept(self._sketch, self._plan, parts, [part.parameter for part in parts], self._buffers[place])

    def _received(self, place: int) -> int:
        """Computes the bytes into which a process receives, which stay from step to step."""
        overlay, parts = self._overlay(place), self._parts[place]
        peak(self._steps[place].marks, overlay)
        return self._steps[place].marks[-1].level + overlay.now - states(parts, 0).gradients

    def _overlay(self, place: int) -> PlanMemory:
        if not uses_shard(self._plan):
            return DdpMemory([], there=False)
        own = [part.parameter for part in self._parts[place]]
        stages = {number: self._cut[number] for number in _stages(self._plan, place)}
        return _ShardedStages(own, stages, self._plan, self._copies)


class _ShardedStages:
    """Stages of a process whose parameters are sharded, each a model of its own to fully_shard."""

    def __init__(
        self, own: Sequence[Parameter], stages: Mapping[int, range], plan: Plan, copies: CommunicationBuffers
    ) -> None:
        held = plan.zero == 1
        self._stages = {
            number: FsdpMemory(
                [
                    parameter if parameter.unit in units else dataclasses.replace(parameter, shape=())
                    for parameter in own
                ],
                plan.shard,
                plan.zero,
                there=False,
                reduces=True,
                copies=copies,
                held=held,
            )
            for number, units in stages.items()
        }
        self._stage = next(iter(stages))

    @property
    def now(self) -> int:
        """Sums the bytes in use."""
        return sum(stage.now for stage in self._stages.values())

    def at(self, mark: Mark) -> int:
        if mark.kind == START:
            self._stage = mark.which
            return self.now
        before = self.now
        if mark.kind == REDUCE:
            return max(self._besides(number, mark) for number in self._stages)
        return max(before, self._besides(self._stage, mark))

    def _besides(self, stage: int, mark: Mark) -> int:
        others = sum(stage_memory.now for number, stage_memory in self._stages.items() if number != stage)
        return others + self._stages[stage].at(mark)


UNFORESEEN = ("exact", "compile", "config")
"""Keys under which a process keeps what the model of memory does not know."""

UNCOPIED = frozenset({"pipeline", "tensor", "offload"})
"""Keys of plans of which it is not known what is copied for a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Memory of the process of a plan that needs most, in bytes."""

    states: States
    peak: int | None
    """Of all that torch allocates on the device in a training step, at most; None: not known for this plan."""
    least: int | None
    """The same where gloo's threads free their copies of gradients at once: on a CPU the peak lies between."""
    rows: int
    """Samples of its largest microbatch."""
    evaluation: int | None = None
    """The peak of an evaluation, without what the task's metrics keep; None: not known for this plan."""
    evaluation_least: int | None = None
    """The same where gloo's threads free at once what they gathered parameters into."""
    checkpoint: int | None = None
    """Bytes of the copies that checkpoints are written from, in host memory, kept from the first one on; None: not
    known."""
    gpu: bool = False
    """Whether the plan trains on GPUs."""
    libraries: LibraryMemory | None = None
    """Memory that libraries keep, on a CPU; None: not measured."""

    @property
    def most(self) -> int | None:
        """Computes the most bytes on the device, checkpoints' copies not counted; None: not known for this plan."""
        if self.peak is None or self.evaluation is None:
            return None
        return max(self.peak, self.evaluation)

    @property
    def with_copies(self) -> int | None:
        """Computes the most bytes on the device of a training that saves; None: not known for this plan."""
        copies = 0 if self.gpu else self.checkpoint
        return None if self.most is None or copies is None else self.most + copies


def refuse_unforeseen(plan: Plan) -> None:
    """Raises PlanError for a plan whose memory is not known."""
    if plan.engine != "native":
        raise PlanError(
            f"engine={plan.engine}: only plans of engine=native are foreseen; grappe measure runs any plan"
        )
    for key in UNFORESEEN:
        if key in plan.changed_keys():
            raise PlanError(f"{key}: what it keeps in memory is not foreseen; grappe measure runs any plan")


def memory_forecast(
    fake_model: FakeModel, plan: Plan, *, batch: int | None = None, gpu: bool = False
) -> MemoryForecast:
    """Computes what a training under `plan` needs.

    Args:
        batch: samples per step over all processes; None: the task's.
        gpu: whether the plan trains on GPUs, whose communication needs no copies of gradients.

    Raises:
        PlanError: the plan's memory is not known, or the task does not support the plan.
        TaskError: the task's own code fails.
    """
    refuse_unforeseen(plan)
    with naming_user_line(fake_model.task):
        return _memory_forecast(fake_model, plan, batch, gpu)


def with_libraries(
    forecast: MemoryForecast, fake_model: FakeModel, plan: Plan, *, batch: int | None = None
) -> MemoryForecast:
    """Returns the needs of `plan`, whose peak is known, with what libraries keep on this machine: kernels are run."""
    kept = library_memory(fake_model, plan, batch or fake_model.task.batch_size)
    return dataclasses.replace(forecast, libraries=kept)


def _memory_forecast(fake_model: FakeModel, plan: Plan, batch: int | None, gpu: bool) -> MemoryForecast:
    everyone = [states(parts, fake_model.buffers) for parts in processes(fake_model, plan)]
    samples = batch or fake_model.task.batch_size
    most, least = (
        _peaks(fake_model, plan, samples, copies) for copies in ((NCCL, NCCL) if gpu else (GLOO_LATE, GLOO))
    )
    return MemoryForecast(
        states=max(everyone, key=lambda states: states.total),
        peak=most.step,
        least=least.step,
        rows=largest_rows(fake_model, plan, samples),
        evaluation=most.evaluation,
        evaluation_least=least.evaluation,
        checkpoint=None
        if plan.changed_keys() & UNCOPIED or fake_model.has_modes
        else copied(fake_model, plan),
        gpu=gpu,
    )


def _peaks(fake_model: FakeModel, plan: Plan, samples: int, copies: CommunicationBuffers) -> Peaks:
    others = plan.tensor > 1 or slices_of(fake_model.task, plan, samples, fake_model.samples).ways > 1
    if others and not fake_group_possible():
        return UNKNOWN
    if plan.offload != "none" and copies is NCCL:  # which of it a GPU holds, and when, was never measured
        return UNKNOWN
    if plan.pipeline > 1:
        return _pipeline_peaks(fake_model, plan, samples, copies)
    return _step_peaks(fake_model, plan, samples, copies)
