"""Points: what was measured of each plan and batch size, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

COMPUTING = ("forward", "backward", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """What one process did in a trial."""

    rank: int
    host: str
    step: float
    """Median seconds a step."""
    phases: Mapping[str, float]
    """Mean seconds a step, by phase; they add up to a step."""
    memory: int
    """Bytes at most: of the GPU's, of the host's else."""
    held: Mapping[str, int]
    """Bytes by kind: parameters, gradients, optimizer."""

    @property
    def busy(self) -> float:
        """Seconds a step that it does not wait for others."""
        return sum(self.phases.values()) - self.phases["communication"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a point, in fresh processes."""

    processes: Sequence[Process]
    steps: int
    joules: float | None
    """A sample."""
    cores_used: float
    """Of the node of process 0, by all processes on average."""

    @property
    def step(self) -> float:
        """Seconds a step, of the slowest process."""
        return max(one.step for one in self.processes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A plan at a batch size."""

    plan: str
    batch: int
    """Samples a step over all processes."""
    processes: int
    slices: int
    """Into how many the batch is cut."""
    device: str = "cpu"
    cores: int = 1
    """Of the nodes it ran on."""
    threads: int = 1
    workers: int | None = None
    """Data-loading processes of each process; None: the samples are in memory."""
    origin: str = "asked"
    """"asked", or "advice": tried since another point suggested it."""
    flops: float | None = None
    """Of a sample's forward and backward."""
    reachable: float | None = None
    """FLOP/s of a large matrix product on the device of one process."""
    trials: Sequence[Trial] = ()
    failure: str = ""
    """Why it could not be measured."""
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why something about it could not be measured."""

    @property
    def rates(self) -> list[float]:
        """Samples per second of each trial."""
        return [self.batch / trial.step for trial in self.trials]

    @property
    def rate(self) -> float:
        """Samples per second over all processes."""
        return statistics.median(self.rates)

    @property
    def joules(self) -> float | None:
        """Joules a sample; None: not measurable here."""
        known = [trial.joules for trial in self.trials if trial.joules is not None]
        return statistics.median(known) if known else None

    @property
    def memory(self) -> int:
        """Bytes of the process that held most."""
        return max(one.memory for trial in self.trials for one in trial.processes)

    @property
    def computed(self) -> float | None:
        """The share of what its devices reach on large matrix products."""
        if not self.flops or not self.reachable:
            return None
        return self.flops * self.rate / (self.reachable * self.processes)

    def share(self, *phases: str) -> float:
        """The share of a step that goes into `phases`, over all processes."""
        return self._median(
            lambda trial: (
                sum(one.phases[name] for one in trial.processes for name in phases)
                / sum(sum(one.phases.values()) for one in trial.processes)
            )
        )

    def cost(self, *phases: str) -> float:
        """Process-seconds a sample that go into `phases`."""
        return statistics.median(self._costs(phases))

    def least(self, *phases: str) -> float:
        """The same in the trial where it is least."""
        return min(self._costs(phases))

    def _costs(self, phases: Sequence[str]) -> list[float]:
        return [
            sum(one.phases[name] for one in trial.processes for name in phases) / self.batch
            for trial in self.trials
        ]

    @property
    def imbalance(self) -> float:
        """Process-seconds a sample that processes wait since another has more to do."""
        return self._median(lambda trial: _waited(trial) / self.batch)

    def slowest(self) -> tuple[Process, float]:
        """The process with most to do, in the trial in the middle, and by how much a step beside the others' median."""
        trial = sorted(self.trials, key=_waited)[len(self.trials) // 2]
        slow = max(trial.processes, key=lambda one: one.busy)
        others = [one.busy for one in trial.processes if one is not slow]
        return slow, slow.busy - statistics.median(others) if others else 0.0

    def middle(self) -> Trial:
        """The trial whose step is the median."""
        return sorted(self.trials, key=lambda trial: trial.step)[len(self.trials) // 2]

    def _median(self, value: Callable[[Trial], float]) -> float:
        return statistics.median(value(trial) for trial in self.trials)


def _waited(trial: Trial) -> float:
    longest = max(one.busy for one in trial.processes)
    return sum(min(longest - one.busy, one.phases["communication"]) for one in trial.processes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """Where a point's efficiency went beside another's, as shares of its own process-seconds."""

    data: float
    communication: float
    imbalance: float
    computing: float
    """The same samples' forward, backward and update take longer: smaller slices, or shared cores and memory."""
    rest: float


def lost(point: Point, first: Point) -> Lost:
    """What `point` spends on a sample beyond what `first` does; below 0: it spends less."""
    whole = point.cost("data", "transfer", "communication", "watching", *COMPUTING)

    def more(*phases: str) -> float:
        return (point.cost(*phases) - first.cost(*phases)) / whole

    imbalance = (point.imbalance - first.imbalance) / whole
    return Lost(
        data=more("data", "transfer"),
        communication=more("communication") - imbalance,
        imbalance=imbalance,
        computing=more(*COMPUTING),
        rest=more("watching"),
    )


def efficiency(point: Point, first: Point) -> float:
    """Samples per second and process, beside `first`'s."""
    return (point.rate / point.processes) / (first.rate / first.processes)


def as_json(point: Point, first: Point) -> dict[str, Any]:
    """For files and for the report."""
    known: dict[str, Any] = {
        name: getattr(point, name)
        for name in (
            "plan",
            "batch",
            "processes",
            "slices",
            "device",
            "cores",
            "threads",
            "workers",
            "origin",
        )
    }
    if point.failure:
        return {**known, "failure": point.failure}
    phases = list(point.trials[0].processes[0].phases)
    return {
        **known,
        "samples_per_second": point.rate,
        "trials": point.rates,
        "speed_up": point.rate / first.rate,
        "efficiency": efficiency(point, first),
        "lost": dataclasses.asdict(lost(point, first)),
        "shares": {name: point.share(name) for name in phases},
        "memory": point.memory,
        "held": dict(point.trials[0].processes[0].held),
        "joules_per_sample": point.joules,
        "flops_per_sample": point.flops,
        "share_of_reachable": point.computed,
        "why": dict(point.why),
    }
