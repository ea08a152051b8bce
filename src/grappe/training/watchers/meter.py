"""Meter: measures a training's use of cores, memory, power and energy, about once a second."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from grappe.data.loading import Loading
from grappe.launch import files
from grappe.launch.world import World, cores
from grappe.profiling import energy, memory
from grappe.profiling.chronometer import Chronometer, StepTimes
from grappe.step.scores import Scores
from grappe.training.reporting import device_name
from grappe.training.run import USAGE
from grappe.training.watchdog import cpu_seconds
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher
from grappe.words import host_name

EVERY_SECONDS = 1.0
SLOW = 0.25  # of a step, from which on a process that has more to do than others speaks against its node
SLOW_STEPS = 100  # which a median needs to say so
LEAST_SECONDS = 0.1  # over less time, a counter that moves a few times a second says nothing about power


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources that one process of a training used, from its first instruction to its end."""

    rank: int
    host: str
    device: str
    """The GPU's name, or "cpu"."""
    seconds: float
    """Wall time."""
    cpu_seconds: float
    """Seconds of all cores, data workers included."""
    cores: int
    """Usable cores of the node; 0 for a process that is not its node's first, so that the numbers can be summed."""
    threads: int
    workers: int | None
    """The process's data workers; None: the samples are in memory."""
    loading: str
    """Way in which samples were loaded at the end, as in a plan; "": they are in memory."""
    gpus: int
    """1 if the process is the first on its GPU, else 0."""
    peak: Mapping[str, int]
    """Peak bytes: "host", resident memory with shared pages; "device", tensors on the GPU."""
    baseline: int
    """Resident bytes before the model was made: Python, torch, the data."""
    held: Mapping[str, int]
    """Bytes of this process's parameters, gradients and optimizer state, at the second update."""
    joules: Mapping[str, float | None]
    """Energy by consumer: "processors" (of the node, by its first process) and "gpu"; None: not measurable here."""
    watts: Mapping[str, float]
    """Peak power by consumer, the mean over about a second; without those that are not measurable here."""
    why: Mapping[str, str]
    """Reasons why values could not be measured."""
    sent: Mapping[str, Mapping[str, int]]
    """Under domain=, the "messages" and "bytes" that this process sends to others in a step, by purpose."""
    timing: StepTimes | None
    """Summary of this process's time."""
    step: int
    samples: int
    """Number of samples of this start, over the whole world."""
    gpu: float | None = None
    """Mean share of the time in which the GPU ran a kernel, 0 to 1; None: a CPU, another process's, or unknown."""

    @property
    def busy(self) -> Mapping[str, float]:
        """Returns this process's own work in the median step by phase, in seconds: without waits and watchers."""
        phases = self.timing.phases if self.timing else {}
        return {name: phase.median for name, phase in phases.items() if name not in ("communication", "watching")}


class Meter(Watcher):
    """Watcher on every process that measures this process; process 0's meter writes usage.jsonl.

    Args:
        per_device: processes that share a GPU.
        began: when the process began, by time.perf_counter.
        baseline: resident bytes before the model was made.
        loading: says how this process loads its samples; None: they are in memory.
    """

    def __init__(
        self,
        world: World,
        chronometer: Chronometer,
        *,
        per_device: int,
        began: float,
        baseline: int,
        loading: Callable[[], Loading | None] = lambda: None,
    ) -> None:
        self._world, self._chronometer, self._began, self._loading = world, chronometer, began, loading
        self._baseline = baseline
        process = world.process
        self._first_of_node = process.local_rank == 0
        self._first_on_gpu = world.device.type == "cuda" and process.local_rank % per_device == 0
        nothing = energy.EnergyCounters(counters=())
        self._processors = energy.processor_counters() if self._first_of_node else nothing
        self._gpu = energy.gpu_counters(world.device.index or 0) if self._first_on_gpu else nothing
        self._since = 0.0
        self._busy, self._asked = 0.0, 0
        self._file: BinaryIO | None = None
        self._earlier = max(0.0, cpu_seconds() - (time.perf_counter() - began))  # before `began`, such as imports
        self._cpu, self._wall = self._earlier, began
        self._joules: dict[str, float | None] = {}
        self._peak_watts: dict[str, float] = {}
        self._step = self._samples = self._first_sample = 0
        self._timing: StepTimes | None = None

    def started(self, info: RunInfo) -> None:
        self._step = info.start
        epoch, within = divmod(info.start, info.steps_per_epoch)
        self._samples = epoch * info.samples + within * info.batch_size
        self._first_sample = self._samples
        self._read_joules()
        if self._world.rank == 0:
            self._file = files.appender(info.folder / USAGE)

    def stepped(self, record: Record) -> None:
        self._since += record.seconds
        self._step, self._samples = record.step, record.samples
        if self._since > EVERY_SECONDS:
            self._since = 0.0
            self.sample()

    def evaluated(self, step: int, scores: Scores) -> None:
        self.sample()

    def ended(self, outcome: Outcome | None) -> None:
        self.sample()
        self._timing = outcome.timing if outcome is not None else None
        if self._file is not None:
            self._file.close()
            self._file = None

    def sample(self) -> None:
        """Writes the use since the last call."""
        before = dict(self._joules)
        cpu, wall = cpu_seconds(), time.perf_counter()
        spent, passed = cpu - self._cpu, wall - self._wall
        self._cpu, self._wall = cpu, wall
        self._read_joules()
        if passed <= 0:
            return
        watts = dict[str, float]()
        for name, joules in self._joules.items():
            earlier = before.get(name)
            if joules is not None and earlier is not None:
                watts[name] = round((joules - earlier) / passed, 2)
        if passed >= LEAST_SECONDS:
            self._peak_watts = {name: max(value, self._peak_watts.get(name, 0.0)) for name, value in watts.items()}
        used = self._gpu.counters[0].utilisation() if self._gpu.counters else None  # type: ignore[attr-defined]
        if used is not None:
            self._busy, self._asked = self._busy + used, self._asked + 1
        if self._file is None:
            return
        steps, phases = self._chronometer.window()
        line: dict[str, Any] = {
            "step": self._step,
            "time": round(time.time(), 3),
            "seconds": round(passed, 6),
            "steps": steps,
            "phases": {name: round(value, 6) for name, value in phases.items() if value},
            "cores": round(spent / passed, 3),
            "memory": memory.peak(self._world.device),
        }
        if watts:
            line["watts"] = watts
        if used is not None:
            line["gpu"] = round(used, 3)
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError:  # a full disk is reported by the checkpoints
            return

    def usage(self) -> Usage:
        """Returns this process's use so far."""
        loading = self._loading()
        return Usage(
            rank=self._world.rank,
            host=host_name(),
            device=device_name(self._world.device),
            seconds=time.perf_counter() - self._began,
            cpu_seconds=cpu_seconds() - self._earlier,
            cores=cores() if self._first_of_node else 0,
            threads=self._world.threads,
            workers=None if loading is None else loading.workers,
            loading="" if loading is None else str(loading),
            gpus=int(self._first_on_gpu),
            peak=memory.peak(self._world.device),
            baseline=self._baseline,
            held=self._chronometer.held,
            joules=dict(self._joules),
            watts=dict(self._peak_watts),
            why={
                name: counters.missing
                for name, counters in (("processors", self._processors), ("gpu", self._gpu))
                if counters.missing
            },
            sent={} if self._world.domain is None else self._world.domain.by_purpose(),
            timing=self._timing,
            step=self._step,
            samples=self._samples - self._first_sample,
            gpu=self._busy / self._asked if self._asked else None,
        )

    def _read_joules(self) -> None:
        if self._first_of_node:
            self._joules["processors"] = energy.total(self._processors.counters)
        if self._first_on_gpu:
            self._joules["gpu"] = energy.total(self._gpu.counters)


def slow_node(usages: Sequence[Usage]) -> dict[str, str]:
    """Names the node whose processes all take much longer for equal work than those of other nodes, with figures."""
    work = {usage.rank: sum(usage.busy.values()) for usage in usages}
    slow = max(usages, key=lambda usage: work[usage.rank])
    others = [usage for usage in usages if usage.host != slow.host]
    if not others or min(usage.timing.steps if usage.timing else 0 for usage in usages) < SLOW_STEPS:
        return {}
    quick = min((usage for usage in usages if usage.host == slow.host), key=lambda usage: work[usage.rank])
    usual = statistics.median(work[usage.rank] for usage in others)
    assert quick.timing is not None, "it has steps"
    if work[quick.rank] - usual < SLOW * quick.timing.step.median:
        return {}
    more = {name: value - statistics.median(each.busy[name] for each in others) for name, value in quick.busy.items()}
    return {
        slow.host: f"process {quick.rank} was slow: {work[quick.rank] * 1e3:.3g} ms of work a step, those of other "
        f"nodes {usual * 1e3:.3g} ms; most of it in {max(more, key=lambda name: more[name])}"
    }


def used(usages: list[Usage], before: Mapping[str, Any]) -> dict[str, Any]:
    """Sums a run's use over all its starts, from this start's processes and the earlier sum.

    Core-hours count all allocated cores, GPU-hours all GPUs, busy or not; `gpu` is the GPUs' mean use, if it is known.
    """
    hours = max(usage.seconds for usage in usages) / 3600
    now: dict[str, Any] = {
        "seconds": hours * 3600,
        "core_hours": hours * sum(usage.cores for usage in usages),
        "cpu_hours": sum(usage.cpu_seconds for usage in usages) / 3600,
        "gpu_hours": hours * sum(usage.gpus for usage in usages),
        "samples": usages[0].samples,
    }
    sums = {name: value + float(before.get(name) or 0) for name, value in now.items()}
    joules: dict[str, float | None] = {}
    for kind in ("processors", "gpu"):
        values = [usage.joules[kind] for usage in usages if kind in usage.joules]
        earlier = before.get("joules", {}).get(kind, 0.0 if not before else None)
        if values:
            gone = any(value is None for value in values) or earlier is None
            joules[kind] = None if gone else sum(value or 0.0 for value in values) + earlier
    watts: dict[str, float] = dict(before.get("watts") or {})
    for usage in usages:
        for name, value in usage.watts.items():
            watts[name] = max(value, watts.get(name, 0.0))
    reasons = {name: reason for usage in usages for name, reason in usage.why.items()}
    shares = [usage.gpu for usage in usages if usage.gpu is not None]
    if shares:
        mean, earlier = statistics.mean(shares), float(before.get("gpu_hours") or 0)
        sums["gpu"] = mean + (float(before.get("gpu", mean)) - mean) * earlier / sums["gpu_hours"]
    return {**sums, "joules": joules, "watts": watts, "why": reasons}
