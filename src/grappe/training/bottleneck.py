"""Bottleneck: the cause that slows a training down most, from the times of its processes, and the change that helps."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grappe.launch.world import World
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import PHASES, START
from grappe.sites.schema import WARNS
from grappe.training.watchers.meter import Usage

STEPS = 200
"""Steps of a start after which a first sentence is due, or twice as many, and so on, until LEAST_SECONDS are over."""
LEAST_SECONDS = 30.0  # in a shorter time a share is noise, and nobody gains by less
WORTH = 1.1  # times as fast: less is not worth a change
COMPUTING = ("forward", "backward", "update")
JOBSTATS = {"gpu": 0.25, "cpu": 0.65}
"""Mean use of GPUs, and of a job's cores, below which jobstats warns with its own settings, as many sites have it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds of one process since its first step."""

    phases: Mapping[str, float]
    """Wall seconds by phase, without the start."""
    processor: float
    """CPU seconds of all its threads."""
    host: str
    cores: frozenset[int]
    """Cores on which it may run."""
    device: str
    spent: float = 0.0
    """CPU seconds with those of its data workers."""
    gpu: float | None = None
    """Mean share of the time in which its GPU ran a kernel; None: unknown, or another process measures it."""

    @property
    def total(self) -> float:
        """Wall seconds of all phases."""
        return sum(self.phases.values())

    @property
    def computing(self) -> float:
        """Wall seconds in which it computes, on a CPU."""
        return sum(self.phases[name] for name in COMPUTING)

    def share(self, phase: str) -> float:
        """Computes a phase's share of its time."""
        return self.phases[phase] / max(1e-9, self.total)


class Bottleneck(NamedTuple):
    """Cause that slows a training down."""

    kind: str
    """"input", "evaluation", "saving", "communication", "slow process", "binding" or "other programs"."""
    saved: float
    """Share of the time that the change would save."""
    change: str
    """Cause and change, the beginning of the sentence."""
    remedy: str = ""
    """The sentence's end."""

    @property
    def faster(self) -> float:
        """Estimate of the samples/s after the change, in times of what they are: 1.9."""
        return 1 / max(0.01, 1 - self.saved)

    @property
    def sentence(self) -> str:
        """The cause, the change, and the gain."""
        return f"{self.change} would give {self.faster:.1f} times the samples/s{self.remedy}"


Waits = Callable[[Sequence[RankTimes]], tuple[float, str]]
"""Gives the share of the time that the slowest process waited for data, and what would change it."""


class BottleneckMeter:
    """The times of a process's steps after the first, from which all processes together find the bottleneck.

    Args:
        usage: returns this process's use of resources so far.
    """

    def __init__(self, chronometer: Chronometer, world: World, usage: Callable[[], Usage]) -> None:
        self._chronometer, self._world, self._usage = chronometer, world, usage
        self._before: list[float] = []
        self._processor = self._spent = 0.0
        self._steps, self._due = 0, STEPS

    def stepped(self) -> bool:
        """Counts a step; returns whether the first sentence is due, on all processes alike."""
        self._steps += 1
        if self._steps == 1:  # it is slower than all others
            self._before, self._processor = self._chronometer.spent()[1], time.process_time()
            self._spent = self._usage().cpu_seconds
        return self._steps == self._due

    def sentence(self, waits: Waits) -> str:
        """Says how little is used, and what the bottleneck is; "": neither, or the training is short. Collective."""
        if self._steps < 2:
            return ""
        times = self._world.gather(self._times())
        if min(each.total for each in times) < LEAST_SECONDS:
            self._due *= 2
            return ""
        largest = bottleneck(times, waits)
        return ": ".join(filter(None, [underused(times), largest.sentence if largest else ""]))

    def _times(self) -> RankTimes:
        spent = zip(PHASES, self._chronometer.spent()[1], self._before, strict=True)
        usage = self._usage()
        return RankTimes(
            phases={name: now - before for name, now, before in spent if name != PHASES[START]},
            processor=time.process_time() - self._processor,
            host=usage.host,
            cores=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
            device=self._world.device.type,
            spent=usage.cpu_seconds - self._spent,
            gpu=usage.gpu,
        )


def underused(times: Sequence[RankTimes]) -> str:
    """Says how little of the GPUs, or of a Slurm job's cores, is used, if sites warn of so little; "" if not."""
    gpus = [each.gpu for each in times if each.gpu is not None]
    if gpus:
        least, _, site = os.environ.get(WARNS, f"{JOBSTATS['gpu']} jobstats").partition(" ")
        share, names = statistics.mean(gpus), "the GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        warning = f"{names} computed {share:.0%} of the time, and {site} warns below {float(least):.0%}"
        return warning if share < float(least) else ""
    asked = int(os.environ.get("SLURM_CPUS_ON_NODE", "0")) * len({each.host for each in times})
    used, least = sum(each.spent / max(1e-9, each.total) for each in times), JOBSTATS["cpu"]
    if asked <= 1 or used >= least * asked or any(each.device != "cpu" for each in times):
        return ""
    return f"{used:.1f} of the job's {asked} cores computed, and jobstats warns below {least:.0%}"


def bottleneck(times: Sequence[RankTimes], waits: Waits) -> Bottleneck | None:
    """Finds what would bring most if it were changed; None: nothing brings a tenth.

    Args:
        times: by rank.
    """
    of_host = [_slow_process(times), _communication(times), _binding(times) or _other_programs(times)]
    if any(each.device != "cpu" for each in times):  # the host is ahead of a GPU, and waits in other phases than it
        of_host = []
    causes = [_input(*waits(times)), _evaluation(times), _saving(times), *of_host]
    worth = [cause for cause in causes if cause is not None and cause.faster >= WORTH]
    return max(worth, key=lambda cause: cause.faster, default=None)


def _input(share: float, remedy: str) -> Bottleneck:
    took = f"input-bound: waiting for data took {share:.0%} of the time; no wait"
    return Bottleneck("input", share, took, f": {remedy}")


def _evaluation(times: Sequence[RankTimes]) -> Bottleneck:
    share = statistics.mean(each.share("evaluation") for each in times)
    return Bottleneck("evaluation", share / 2, f"evaluating took {share:.0%} of the time: half as often")


def _saving(times: Sequence[RankTimes]) -> Bottleneck:
    share = statistics.mean(each.share("checkpoint") for each in times)
    return Bottleneck("saving", share * 0.9, f"saving took {share:.0%} of the time: ten times less often")


def _slow_process(times: Sequence[RankTimes]) -> Bottleneck | None:
    """The process that computes longest, if the others wait about as long as it computes more than they do."""
    computing = [each.computing for each in times]
    slowest = max(range(len(times)), key=computing.__getitem__)
    others = [seconds for rank, seconds in enumerate(computing) if rank != slowest]
    if not others:
        return None
    more = computing[slowest] - statistics.median(others)
    waits = min(each.phases["communication"] for rank, each in enumerate(times) if rank != slowest)
    if waits - times[slowest].phases["communication"] < more / 2:
        return None
    longer, host = computing[slowest] / max(1e-9, statistics.median(others)), times[slowest].host
    says = (
        f"process {slowest} on {host} computes {longer:.1f} times as long as the others, which wait: a node as quick "
        "as theirs"
    )
    return Bottleneck("slow process", more / max(1e-9, times[slowest].total), says)


def _communication(times: Sequence[RankTimes]) -> Bottleneck:
    share = min(each.share("communication") for each in times)
    says = f"exchanging gradients took {share:.0%} of the time: a batch twice as large"
    return Bottleneck("communication", share / 2, says)


def _binding(times: Sequence[RankTimes]) -> Bottleneck | None:
    """Processes of a node that are bound to fewer cores than they are."""
    for host in dict.fromkeys(each.host for each in times):
        bound = [each for each in times if each.host == host]
        cores, count = len(frozenset[int]().union(*(each.cores for each in bound))), len(bound)
        if 0 < cores < count:
            says = f"{count} processes on {host} may run on {cores} of its cores: a core for each (--cpus-per-task)"
            return Bottleneck("binding", _computing(bound) * (1 - cores / count), says)
    return None


def _other_programs(times: Sequence[RankTimes]) -> Bottleneck:
    """A process that computes, and has fewer CPU seconds than wall seconds: its cores work for others."""
    lost = max(0.0, 1 - min(each.processor / max(1e-9, each.computing) for each in times))
    says = f"other programs had its cores for {lost:.0%} of the time that it computed: cores of its own"
    return Bottleneck("other programs", _computing(times) * lost, says)


def _computing(times: Sequence[RankTimes]) -> float:
    """Computes the mean share of their time in which processes compute."""
    return statistics.mean(each.computing / max(1e-9, each.total) for each in times)
