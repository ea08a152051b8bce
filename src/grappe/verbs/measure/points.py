"""Points: the options of a measurement, and the figures of each plan and batch size; needs no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from grappe.errors import UsageError
from grappe.fields import Counts, at_least
from grappe.table import Table, Tabular

COMPUTING = ("forward", "backward", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The extent of a measurement.

    `grappe measure` has an option for each field, with the docstring under the field as its help.
    """

    steps: int = 30
    """Timed steps of each training, after 5 warm-up steps."""
    repeats: int = 3
    """Number of trainings of each plan; the plans alternate."""
    batch_size: Counts = ()
    """Samples per step over all processes: (32, 64), or the field batch_size=32,64. Default: the task's own."""
    weak: bool = False
    """Weak scaling: batch sizes are for one data-parallel process and grow with their number."""
    why: bool = False
    """Show where each plan's time goes and what would shorten it, beginning with the device's peak."""

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "repeats")
        if min(self.batch_size, default=1) < 1:
            raise UsageError(f"batch_size={min(self.batch_size)}: it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """The measurements of one process in a trial."""

    rank: int
    host: str
    step: float
    """Median seconds per step."""
    phases: Mapping[str, float]
    """Mean seconds per step, by phase; their sum is a step."""
    memory: int
    """Peak bytes of the GPU's memory; without a GPU, of the host's."""
    held: Mapping[str, int]
    """Bytes by kind: parameters, gradients, optimizer."""

    @property
    def busy(self) -> float:
        """Computes the seconds per step in which this process does not wait for others."""
        return sum(self.phases.values()) - self.phases["communication"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One training of a point, in new processes."""

    processes: Sequence[ProcessTimes]
    joules: float | None
    """Joules per sample."""

    @property
    def step(self) -> float:
        """Returns the seconds per step of the slowest process."""
        return max(process.step for process in self.processes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A plan at a batch size."""

    plan: str
    batch: int
    """Samples per step over all processes."""
    processes: int
    slices: int
    """Number of data slices of the batch."""
    device: str = "cpu"
    cores: int = 1
    """Number of cores of the point's nodes."""
    threads: int = 1
    workers: int | None = None
    """Data workers of each process; None: the samples are in memory."""
    origin: str = "asked"
    """"asked"; "script": of a launched script; or "advice": measured because another point suggested it."""
    flops: float | None = None
    """FLOPs of a sample's forward and backward."""
    reachable: float | None = None
    """Measured FLOP/s of a large matrix product on one process's device."""
    sent: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """Under domain=, the "messages" and "bytes" that process 0 sends in a step, by purpose."""
    trials: Sequence[TimedRun] = ()
    load: float = 0.0
    """The machine's load average just before the measurement, where other programs take all its cores; else 0.0."""
    failure: str = ""
    """The reason why the point could not be measured."""
    unmeasured: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The reasons why some of the point's values could not be measured."""

    @property
    def rates(self) -> list[float]:
        """Computes the samples per second of each trial."""
        return [self.batch / trial.step for trial in self.trials]

    @property
    def rate(self) -> float:
        """Computes the samples per second over all processes."""
        return statistics.median(self.rates)

    @property
    def joules(self) -> float | None:
        """Computes the joules per sample; None: not measurable here."""
        joules = [trial.joules for trial in self.trials if trial.joules is not None]
        return statistics.median(joules) if joules else None

    @property
    def memory(self) -> int:
        """Returns the highest process's peak bytes."""
        return max(process.memory for trial in self.trials for process in trial.processes)

    @property
    def computed(self) -> float | None:
        """Computes FLOP/s as a share of the devices' measured FLOP/s on large matrix products."""
        if not self.flops or not self.reachable:
            return None
        return self.flops * self.rate / (self.reachable * self.processes)

    def share(self, *phases: str) -> float:
        """Computes the share of a step that `phases` take, over all processes."""
        return statistics.median(
            sum(process.phases[name] for process in trial.processes for name in phases)
            / sum(sum(process.phases.values()) for process in trial.processes)
            for trial in self.trials
        )

    def cost(self, *phases: str) -> float:
        """Computes the process-seconds per sample that `phases` take; without any, a step."""
        return statistics.median(self._costs(phases))

    def least(self, *phases: str) -> float:
        """Computes the same in the trial with the lowest cost."""
        return min(self._costs(phases))

    def _costs(self, phases: Sequence[str]) -> list[float]:
        return [
            sum(process.phases[name] for process in trial.processes for name in phases or process.phases) / self.batch
            for trial in self.trials
        ]

    @property
    def imbalance(self) -> float:
        """Computes the process-seconds per sample in which processes wait because another has more work."""
        return statistics.median(_waited(trial) / self.batch for trial in self.trials)

    def slowest(self) -> tuple[ProcessTimes, float, str]:
        """Finds the process with the most work, its extra seconds per step, and the phase that has most of them."""
        trial = sorted(self.trials, key=_waited)[len(self.trials) // 2]
        slow = max(trial.processes, key=lambda process: process.busy)
        busy = [process.busy for process in trial.processes if process is not slow]
        others = [process for process in self.middle().processes if process.rank != slow.rank]
        excess = {
            phase: seconds - sum(process.phases[phase] for process in others) / len(others)
            for phase, seconds in slow.phases.items()
            if phase != "communication"
        }
        return slow, slow.busy - statistics.median(busy), max(excess, key=lambda phase: excess[phase])

    def middle(self) -> TimedRun:
        """Returns the trial with the median step."""
        return sorted(self.trials, key=lambda trial: trial.step)[len(self.trials) // 2]


def _waited(trial: TimedRun) -> float:
    longest = max(process.busy for process in trial.processes)
    return sum(min(longest - process.busy, process.phases["communication"]) for process in trial.processes)


def efficiency_loss(point: Measurement, first: Measurement) -> dict[str, float]:
    """Computes the extra cost per sample of `point` over `first` by cause, in shares of `point`'s process-seconds.

    "computing": forward, backward and update of the same samples take longer: smaller slices, or shared cores. Below 0
    `point` costs less.
    """
    total = point.cost()

    def more(*phases: str) -> float:
        return (point.cost(*phases) - first.cost(*phases)) / total

    imbalance = (point.imbalance - first.imbalance) / total
    return {
        "data": more("data", "transfer"),
        "communication": more("communication") - imbalance,
        "imbalance": imbalance,
        "computing": more(*COMPUTING),
        "rest": more("watching"),
    }


def efficiency(point: Measurement, first: Measurement) -> float:
    """Computes the samples per second and process, relative to `first`."""
    return (point.rate / point.processes) / (first.rate / first.processes)


def baseline(point: Measurement, points: Sequence[Measurement]) -> Measurement | None:
    """Finds the first other point whose efficiency can be compared: of this device and batch, or this slice (weak).

    A larger batch costs less a sample, whatever the number of processes: between batches there is no efficiency.
    """
    for other in points:
        if other is point:
            break
        if other.failure or other.device != point.device:
            continue
        if other.batch == point.batch or other.batch / other.slices == point.batch / point.slices:
            return other
    return None


class Measurements(list[Measurement], Tabular):
    """Measured points; the first is the baseline of the comparison."""

    def table(self) -> Table:
        """Returns a row for each point: speed, efficiency, bytes, and the share of a step that each phase takes."""
        names = ("plan", "batch", "processes", "samples_per_second", "speed_up", "efficiency", "memory")
        points = [as_json(point, self) for point in self]
        return Table(
            {name: point.get(name) for name in names}
            | {"joules_per_sample": point.get("joules_per_sample"), **point.get("shares", {})}
            | ({"failure": point["failure"]} if "failure" in point else {})
            for point in points
        )


def as_json(point: Measurement, points: Sequence[Measurement]) -> dict[str, Any]:
    """Converts a point of `points` to JSON, for files and for the report."""
    names = ("plan", "batch", "processes", "slices", "device", "cores", "threads", "workers", "origin")
    content: dict[str, Any] = {name: getattr(point, name) for name in names}
    if point.failure:
        return {**content, "failure": point.failure}
    first = next(point for point in points if not point.failure)
    base = baseline(point, points)
    phases = list(point.trials[0].processes[0].phases)
    return {
        **content,
        "samples_per_second": point.rate,
        "trials": point.rates,
        "speed_up": point.rate / first.rate,
        "efficiency": None if base is None else efficiency(point, base),
        "lost": None if base is None else efficiency_loss(point, base),
        "shares": {name: point.share(name) for name in phases},
        "memory": point.memory,
        "sent": {purpose: dict(each) for purpose, each in point.sent.items()},
        "held": dict(point.trials[0].processes[0].held),
        "joules_per_sample": point.joules,
        "flops_per_sample": point.flops,
        "share_of_reachable": point.computed,
        "why": dict(point.unmeasured),
    }
