"""Forecast: what a process of a plan needs, composed from what the plain model needs: states, peaks, copies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from grappe.checkpoint.saver import next_writer
from grappe.errors import PlanError, ProcessDied
from grappe.errors.user_code import naming_user_line
from grappe.foresight import memory, partition
from grappe.foresight.fake_model import UNCUT, FakeModel, Part, slices_of
from grappe.foresight.kernels import OF_LIBRARIES, Call
from grappe.foresight.pipeline_trace import order_of
from grappe.foresight.trace import REDUCE, START, Mark, Trace
from grappe.launch.fork import run_in_fork
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.parallel.materialise import untied
from grappe.parallel.pipeline.cut import pipeline_units
from grappe.plan import Plan
from grappe.profiling.memory import data_size, return_freed_memory
from grappe.step.scores import bytes_kept

UNFORESEEN = ("exact", "compile", "config", "cut")
"""Keys under which a process keeps what the model of memory does not know."""

UNCOPIED = frozenset({"pipeline", "tensor", "offload"})
"""Keys of plans for which the bytes copied for a checkpoint are unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryMemory:
    """Bytes that libraries keep in one process."""

    evaluation: int = 0
    """From the first evaluation on."""
    step: int = 0
    """From the first step on, in addition."""

    @property
    def total(self) -> int:
        """Sums both."""
        return self.evaluation + self.step


NOTHING_KEPT = LibraryMemory()


class Peaks(NamedTuple):
    """The most bytes that torch allocates on a process's device; None: not known."""

    step: int | None = None
    evaluation: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Memory of the process of a plan that needs most, in bytes."""

    states: memory.States
    peak: int | None
    """Peak bytes that torch allocates on the device in a training step; None if not known for this plan."""
    least: int | None
    """The same where gloo's threads free their copies of gradients at once: on a CPU the peak lies between."""
    rows: int
    """Samples of its largest microbatch."""
    evaluation: int | None = None
    """The peak of an evaluation, without what the task's metrics take; None: not known for this plan."""
    evaluation_least: int | None = None
    """The same where gloo's threads free at once what they gathered parameters into."""
    checkpoint: int | None = None
    """Bytes of the copies that checkpoints are written from, in host memory, kept from the first one on; None: not
    known."""
    gpu: bool = False
    """Whether the plan trains on GPUs."""
    libraries: LibraryMemory | None = None
    """Memory that libraries keep, on a CPU; None: not measured."""
    data: int = 0
    """Bytes of a corpus's blocks in the host memory of each process that loads samples."""
    host: int = 0
    """Bytes of activations in a process's host memory at most; of all microbatches of a pipeline."""

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


def memory_forecast(
    fake_model: FakeModel, plan: Plan, *, batch: int | None = None, gpu: bool = False, bounded: bool = False
) -> MemoryForecast:
    """Computes what a training under `plan` needs.

    Args:
        batch: samples per step over all processes; None: the task's.
        gpu: whether the plan trains on GPUs, whose communication needs no copies of gradients.
        bounded: whether an upper bound is enough where nothing was measured: for the peak of offload on a GPU.

    Raises:
        PlanError: the plan's memory is not known, or the task does not support the plan.
        TaskError: the task's own code fails.
    """
    if plan.engine != "native":
        raise PlanError(f"engine={plan.engine}: only plans of engine=native are foreseen; grappe measure runs any plan")
    for key in UNFORESEEN:
        if key in plan.changed_keys():
            more = f", only what check={plan.check} adds: {plan.checked:.2%} of a step" if plan.check else ""
            raise PlanError(f"{key}: its memory is not foreseen{more}; grappe measure runs any plan")
    fake_model = fake_model.of(plan)
    samples = batch or fake_model.task.batch_size
    with naming_user_line(fake_model.task):
        all_states = [memory.states(parts, fake_model.buffers) for parts in partition.processes(fake_model, plan)]
        most, least, host = Peaks(), Peaks(), 0
        if (bounded or not gpu or plan.offload == "none") and _has_known_peaks(fake_model, plan, samples):
            several = composed(fake_model, plan, samples, gpu=gpu)

            def largest(copies: memory.CommunicationBuffers) -> Peaks:
                kinds = zip(*(each.peaks(copies) for each in several), strict=True)
                return Peaks(*(None if None in sizes else max(sizes) for sizes in kinds))

            most = largest(memory.NCCL if gpu else memory.GLOO_LATE)
            least = largest(memory.NCCL if gpu else memory.GLOO)
            host = max(sum(step.moved) for each in several for _, step in each.traces) // 2
        copies_known = not plan.changed_keys() & UNCOPIED and not fake_model.has_modes
        return MemoryForecast(
            states=max(all_states, key=lambda states: states.total),
            peak=most.step,
            least=least.step,
            rows=partition.largest_rows(fake_model, plan, samples),
            evaluation=most.evaluation,
            evaluation_least=least.evaluation,
            checkpoint=_checkpoint_copies(fake_model, plan) if copies_known else None,
            gpu=gpu,
            data=fake_model.batches.kept,
            host=host,
        )


def composed(
    fake_model: FakeModel, plan: Plan, samples: int, *, gpu: bool = False
) -> list[AlikeProcesses | PipelinedProcesses]:
    """Returns the processes that differ: of a pipeline together, those of domain= each by itself."""
    if plan.pipeline > 1:
        return [PipelinedProcesses(fake_model, plan, samples)]
    parts = (Part(number, plan.domain) for number in range(plan.domain))
    return [AlikeProcesses(fake_model, plan, samples, part, gpu=gpu) for part in parts]


def _has_known_peaks(fake_model: FakeModel, plan: Plan, samples: int) -> bool:
    task = fake_model.task
    several = plan.tensor * plan.domain > 1 or slices_of(task, plan, samples, fake_model.samples).ways > 1
    if several and dist.is_initialized():  # no other world can be pretended inside a training
        return False
    if plan.pipeline == 1:
        return True
    if plan.tensor > 1 or plan.offload != "none" or task.whole_batch_loss:
        return False
    units = pipeline_units(task, fake_model.plain)
    # With ties, the stages' roots gather parameters, too.
    return not plan.uses_fsdp or len(untied(fake_model.plain, units)) == len(units)


def _checkpoint_copies(fake_model: FakeModel, plan: Plan) -> int:
    """Computes the bytes of the process that copies most; for plans that only replicate and shard."""
    copies = plan.replicate * plan.domain
    split_loads, unsplit_loads = [0] * copies, [0] * (copies * plan.shard)
    split, unsplit = Counter[int](), Counter[int]()  # bytes that each writer copies

    def add(size: int, sharded_as: memory.Parameter | None) -> None:
        if sharded_as is None or plan.shard == 1 or not sharded_as.shape:
            unsplit[next_writer(unsplit_loads, size)] += size
        else:
            rows = memory.rows_of(sharded_as, plan.shard, 0)
            split[next_writer(split_loads, size)] += size * rows // max(1, sharded_as.shape[0])

    for parameter in fake_model.parameters:
        for size in parameter.states:
            add(size, parameter)
        for size in parameter.whole_states:
            add(size, None)
    for parameter in fake_model.parameters:
        add(parameter.size, parameter)
    for parameter in fake_model.parameters:
        if parameter.trained and fake_model.task.ema is not None:
            add(parameter.size, parameter)
    return max(split.values(), default=0) + max(unsplit.values(), default=0) + fake_model.buffers


class AlikeProcesses:
    """Processes that each run all units: replicated, sharded, offloaded, split; the neediest one counts.

    Args:
        part: what each holds of each sample.
        gpu: whether a plan with offload keeps parameters, gradients and optimizer state elsewhere.
    """

    def __init__(
        self, fake_model: FakeModel, plan: Plan, samples: int, part: Part = UNCUT, *, gpu: bool = False
    ) -> None:
        self._fake_model, self._plan, task = fake_model, plan, fake_model.task
        precision, threads = partition.precision_of(plan), partition.threads_of(plan)
        slices = slices_of(task, plan, samples, fake_model.samples)
        rows = partition.largest_rows(fake_model, plan, samples)
        self._trained = fake_model.trace(rows, precision, plan.recompute, threads, plan.tensor, slices, part)
        # A loss of the whole batch takes an evaluation's batch whole, too.
        evaluated = dataclasses.replace(plan, microbatches=1, batchnorm="local")
        slices = slices_of(task, evaluated, samples, fake_model.validation_samples)
        self._rows = partition.evaluated_rows(fake_model, plan, samples)
        self._scored = fake_model.trace(self._rows, precision, False, threads, plan.tensor, slices, part, trains=False)
        shapes = partition.tensor_parts(fake_model, plan)[0]
        self._own = [
            dataclasses.replace(parameter, shape=shapes.get(parameter.name, parameter.shape))
            for parameter in fake_model.parameters
        ]
        self._away = gpu and plan.offload != "none"
        self._parts = [] if self._away else next(partition.processes(fake_model, plan))
        self._kept = partition.kept(fake_model, plan, self._parts, [] if self._away else self._own)
        if self._away:  # for a moment, one unit's parts that came from the host and one's that go there; not measured
            parts = Counter[int]()
            for parameter in self._own:
                parts[parameter.unit] += memory.padded(parameter, plan.shard) // plan.shard
            self._kept += 2 * max(parts.values(), default=0)

    @property
    def traces(self) -> list[tuple[tuple[Trace, ...], Trace]]:
        """Returns an evaluation's and a step's trace of each process that differs from others: here one."""
        return [((self._scored,), self._trained)]

    def peaks(self, copies: memory.CommunicationBuffers) -> Peaks:
        """Computes the peaks; each is None where the memory of some kernels is unknown."""
        return Peaks(
            step=self.steps(copies)[0] if self._trained.complete else None,
            evaluation=self._evaluation(copies) if self._scored.complete else None,
        )

    def steps(self, copies: memory.CommunicationBuffers) -> list[int]:
        """Computes the most bytes of a step, of each process that differs from others: here one."""
        trace, plan, last = self._trained, self._plan, self._plan.microbatches - 1
        ahead, marks = trace.marks[: trace.ahead], trace.marks[trace.ahead :]
        memories = {(number == 0, number == last) for number in range(plan.microbatches)}
        passes = max(memory.peak(marks, self._memory(copies, is_first, is_last)) for is_first, is_last in memories)
        passes += trace.message if copies.lingers else 0
        first = memory.peak(ahead, self._memory(copies)) + partition.RANDOM_STATE if ahead else 0
        temporary = self._fake_model.together * max((part.temporary for part in self._parts), default=0)
        update = int(memory.states(self._parts, 0).gradients + temporary)
        # The batch before is kept until its loss is read, one step late.
        constant = self._kept + 2 * plan.microbatches * trace.batch
        levels = plan.recomputed(len(self._fake_model.units(self._fake_model.plain)) or 1)
        random_states = partition.RANDOM_STATE * sum(level in partition.REPEATED for level in levels)
        return [constant + max(passes, first, update) + random_states]

    def _evaluation(self, copies: memory.CommunicationBuffers) -> int:
        """Computes the most bytes in an evaluation between two steps."""
        # With zero=1 and 2, the second batch finds gathered what the first one has left.
        number = -(-self._fake_model.validation_samples // (self._rows * self._plan.data_parallel))
        most = memory.peak(self._scored.marks * min(2, number), self._memory(copies))
        # The step before has its batch until its loss is read.
        batches = self._plan.microbatches * self._trained.batch + self._scored.batch
        most += self._scored.message if copies.lingers else 0
        return self._kept + most + batches + bytes_kept(number, self._scored.numbers)

    def _memory(
        self, copies: memory.CommunicationBuffers, is_first: bool = True, is_last: bool = True
    ) -> memory.PlanMemory:
        """Returns the plan's memory during a microbatch; in a forward without backward, that of an only one."""
        plan = self._plan
        if plan.uses_fsdp:
            reduces = is_last or plan.zero != 1
            return memory.FsdpMemory(
                self._own, plan.shard, plan.zero, there=not is_first, reduces=reduces, copies=copies, away=self._away
            )
        sizes = [parameter.size if parameter.trained else 0 for parameter in self._own]
        return memory.DdpMemory(sizes, there=not is_first, buckets=sum(sizes) if plan.uses_ddp else 0, last=is_last)


class PipelinedProcesses:
    """A pipeline's processes, by their place in it; of plans that do not split layers, without offload."""

    def __init__(self, fake_model: FakeModel, plan: Plan, samples: int) -> None:
        self._fake_model, self._plan = fake_model, plan
        self._cut = partition.cut_of(fake_model, plan)
        self._rows = partition.evaluated_rows(fake_model, plan, samples)
        self._steps = partition.traced_passes(fake_model, plan, samples)
        self._scored = fake_model.passes(
            partition.traced_plan(plan), self._cut, self._rows, partition.threads_of(plan), trains=False
        )
        self._parts = partition.first_processes(fake_model, plan)
        self._buffers = partition.stage_buffers(fake_model, plan)
        self._stages = [range(place, len(self._scored), plan.pipeline) for place in range(plan.pipeline)]

    @property
    def traces(self) -> list[tuple[tuple[Trace, ...], Trace]]:
        """Returns the traces of an evaluation, by stage, and of a step, of each process."""
        scored = [tuple(self._scored[stage] for stage in stages) for stages in self._stages]
        return list(zip(scored, self._steps, strict=True))

    def peaks(self, copies: memory.CommunicationBuffers) -> Peaks:
        """Computes the peaks of the neediest process; None where the memory of some kernels is unknown."""
        if not all(trace.complete for trace in (*self._steps, *self._scored)):
            return Peaks()
        evaluations = (self._evaluation(place, copies) for place in range(self._plan.pipeline))
        return Peaks(step=max(self.steps(copies)), evaluation=max(evaluations))

    def steps(self, copies: memory.CommunicationBuffers) -> list[int]:
        """Computes the most bytes of a step, of each process."""
        return [self._step(place, copies) for place in range(self._plan.pipeline)]

    def _step(self, place: int, copies: memory.CommunicationBuffers) -> int:
        """Computes the most bytes of a process's passes, of the sum over replicas, and of the optimizer's step."""
        plan, parts, summed = self._plan, self._parts[place], 0
        trace, overlay = self._steps[place], self._memory(place, copies)
        passes = memory.peak(trace.marks, overlay)
        after = trace.marks[-1].level + overlay.now
        if plan.replicate > 1 and not plan.uses_fsdp:
            summed = memory.states(parts, 0).gradients  # flat copies, all at once
        temporary = int(self._fake_model.together * max((part.temporary for part in parts), default=0))
        waiting = most_waiting = 0  # units whose forward will run again, each with a random state
        levels = plan.recomputed(max(max(units) for units in self._cut) + 1)
        for kind, stage, _ in order_of(plan, place) if plan.recompute else ():
            waiting += sum(levels[unit] in partition.REPEATED for unit in self._cut[stage]) * (
                1 if kind == "forward" else -1
            )
            most_waiting = max(most_waiting, waiting)
        # A stage's generators begin where the stage before it left them.
        states_between = sum((stage > 0) + (stage < len(self._scored) - 1) for stage in self._stages[place])
        most = max(passes, after + max(summed, temporary)) + partition.RANDOM_STATE * (most_waiting + states_between)
        # The batch before is kept until its loss is read, one step late.
        return self._kept(place) + 2 * plan.microbatches * trace.batch + most

    def _evaluation(self, place: int, copies: memory.CommunicationBuffers) -> int:
        """Computes the most bytes of an evaluation on a process: its stages', and its sent tensors'."""
        plan, scored, step = self._plan, self._scored, self._steps[place]
        number = -(-self._fake_model.validation_samples // (self._rows * plan.data_parallel))
        own = [scored[stage] for stage in self._stages[place]]
        sent = max((trace.boundaries[0] for trace in own if trace is not scored[-1]), default=0)
        # Sent tensors are freed when as many more have been sent.
        waiting = min(number - 1, 2 * plan.pipeline) * sent
        # With zero=1 and 2, the second batch finds gathered what the first one has left.
        marks = [mark for trace in own for mark in trace.marks] * min(2, number)
        batches = plan.microbatches * self._steps[0].batch + min(number, plan.pipeline) * scored[0].batch
        most = memory.peak(marks, self._memory(place, copies)) + sum(bytes_kept(number, trace.numbers) for trace in own)
        # The buffers into which a step receives stay from step to step.
        overlay = self._memory(place, copies)
        memory.peak(step.marks, overlay)
        received = step.marks[-1].level + overlay.now - memory.states(self._parts[place], 0).gradients
        return self._kept(place) + received + most + waiting + batches

    def _kept(self, place: int) -> int:
        parts = self._parts[place]
        own = [part.parameter for part in parts]
        return partition.kept(self._fake_model, self._plan, parts, own, self._buffers[place])

    def _memory(self, place: int, copies: memory.CommunicationBuffers) -> memory.PlanMemory:
        if not self._plan.uses_fsdp:
            return memory.DdpMemory([], there=False)
        own = [part.parameter for part in self._parts[place]]
        return _ShardedStages(own, {stage: self._cut[stage] for stage in self._stages[place]}, self._plan, copies)


class _ShardedStages:
    """Stages of a process whose parameters are sharded, each a model of its own to fully_shard."""

    def __init__(
        self,
        own: Sequence[memory.Parameter],
        stages: Mapping[int, range],
        plan: Plan,
        copies: memory.CommunicationBuffers,
    ) -> None:
        self._stages = {
            number: memory.FsdpMemory(
                [
                    parameter if parameter.unit in units else dataclasses.replace(parameter, shape=())
                    for parameter in own
                ],
                plan.shard,
                plan.zero,
                there=False,
                reduces=True,
                copies=copies,
                held=plan.zero == 1,
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


Calls = tuple[tuple[Call, ...], tuple[Call, ...]]
"""The distinct calls of an evaluation and of a step, of one process."""


def library_memory(fake_model: FakeModel, plan: Plan, samples: int) -> LibraryMemory | None:
    """Measures what libraries keep in the process of a plan in which they keep most, at `samples` samples a step.

    Each distinct kernel is run once, in a process of its own, where freed memory goes back at once. None: that process
    got no memory, or the fake model has no kernels.
    """
    if fake_model.kernels is None:
        return None
    traces = [each for processes in composed(fake_model, plan, samples) for each in processes.traces]
    calls = dict.fromkeys((_distinct_calls(evaluated), _distinct_calls([step])) for evaluated, step in traces)
    try:
        memories = _measured(tuple(calls), partition.threads_of(plan))
    except ProcessDied:
        return None
    return max(memories, key=lambda memory: memory.total)


def _distinct_calls(traces: Sequence[Trace]) -> tuple[Call, ...]:
    calls = dict.fromkeys(call for trace in traces for _, _, call in trace.calls)
    return tuple(call for call in calls if call.starts(OF_LIBRARIES) and not call.too_large)


@functools.lru_cache(maxsize=64)
def _measured(calls: tuple[Calls, ...], threads: int) -> list[LibraryMemory]:
    return local("grappe.foresight.forecast:worker", (calls, threads), 1, from_training=True)


def worker(
    request: tuple[tuple[Calls, ...], int], process: ProcessRank, rendezvous_folder: Path
) -> list[LibraryMemory]:
    """Runs the calls of each process, with a number of threads, in a fork of this one, whose libraries keep nothing."""
    memories, (calls, threads) = [], request
    for evaluation, step in calls:
        text = run_in_fork(functools.partial(_kept, evaluation, step, threads))
        after_evaluation, after_step = map(int, text.split())
        memories.append(LibraryMemory(evaluation=after_evaluation, step=after_step))
    return memories


def _kept(evaluation: Iterable[Call], step: Iterable[Call], threads: int) -> str:
    """Runs the calls; returns the bytes that stay after the evaluation's, and those that the step's add."""
    return_freed_memory(always=True)
    torch.set_num_threads(threads)
    start = data_size()
    torch.ones(threads << 16).exp_()  # starts all threads, as operators of no library do
    _run(evaluation)
    between = data_size()
    _run(step)
    return f"{max(0, between - start)} {max(0, data_size() - between)}"


@torch.no_grad()
def _run(calls: Iterable[Call]) -> None:
    for call in calls:
        with contextlib.suppress(RuntimeError):  # in bf16 fake tensors may have types that no kernel takes
            call.on_ones()()
