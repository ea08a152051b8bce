"""Bottleneck: the cause that slows a training down most, from the times of its processes, and the change that helps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from grappe.data.loading import SPARE
from grappe.launch.world import World, own_cores
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import LEAST_SECONDS, PHASES, START
from grappe.sites.schema import WARNS
from grappe.training.watchdog import cpu_seconds
from grappe.training.watchers.meter import Usage

STEPS = 200
"""Steps of a start after which a first sentence is due, or twice as many, and so on, until LEAST_SECONDS are over."""
WORTH = 1.1  # times as fast: less is not worth a change
WORTH_MORE = 1.25  # of a change that changes what is learned, and of a cause that the system's own programs look like
PAUSES = ("evaluation", "checkpoint", "watching")
COMPUTING = ("forward", "backward", "update")
STORAGE = 0.3  # of the time that a sample takes to load: with less computing it is read, or waited for
HANDED = 0.005  # CPU seconds in which a worker hands a batch over, on a machine with slow memory
BUSY = 0.9  # of its cores: such a training takes them from itself
THREADED = 0.01  # seconds of computing in a step: in less, more threads bring nothing
JOBSTATS = {"gpu": 0.25, "cpu": 0.65}
"""Mean use of GPUs, and of a job's cores, below which jobstats warns with its own settings, as many sites have it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds of one process since its first step."""

    steps: int
    phases: Mapping[str, float]
    """Wall seconds by phase, without the start."""
    processor: float
    """CPU seconds of all its threads."""
    loading: float
    """CPU seconds of all its threads while its steps wait for data."""
    workers: float
    """CPU seconds of the processes that it has started."""
    delayed: float
    """Seconds in which its main thread could compute, and had no core; 0 if the system does not count them."""
    threads: int
    own_cores: int
    """Number of cores for it alone."""
    host: str
    cores: frozenset[int]
    """Cores on which it may run."""
    device: str
    gpu: float | None = None
    """Mean share of the time in which its GPU ran a kernel; None: unknown, or another process measures it."""

    @property
    def total(self) -> float:
        """Wall seconds of all phases."""
        return max(1e-9, sum(self.phases.values()))

    @property
    def computing(self) -> float:
        """Wall seconds in which it computes, on a CPU."""
        return sum(self.phases[name] for name in COMPUTING)

    def share(self, phase: str) -> float:
        """Computes a phase's share of its time."""
        return self.phases[phase] / self.total


class Bottleneck(NamedTuple):
    """Cause that slows a training down."""

    kind: str
    """"input", "storage", "evaluation", "saving", "watching", "small batches", "communication", "threads", "slow
    process", "binding" or "other programs"."""
    saved: float
    """Share of the time that the change would save."""
    change: str
    """Cause and change, the beginning of the sentence."""
    remedy: str = ""
    """The sentence's end."""
    bound: str = ""
    """"at least " or "at most ", where times do not show how much."""

    @property
    def faster(self) -> float:
        """Estimate of the samples/s after the change, in times of what they are: 1.9."""
        return 1 / max(0.01, 1 - self.saved)

    @property
    def sentence(self) -> str:
        """The cause, the change, and the gain."""
        return f"{self.change} would give {self.bound}{self.faster:.1f} times the samples/s{self.remedy}"


class BottleneckMeter:
    """The times of a process's steps after the first, from which all processes together find the bottleneck.

    Args:
        usage: returns this process's use of resources so far.
    """

    def __init__(self, chronometer: Chronometer, world: World, usage: Callable[[], Usage]) -> None:
        self._chronometer, self._world, self._usage = chronometer, world, usage
        self._before: list[float] = []
        self._steps, self._due = 0, STEPS

    def stepped(self) -> bool:
        """Counts a step; returns whether the first sentence is due, on all processes alike."""
        self._steps += 1
        if self._steps == 1:  # it is slower than all others
            self._before = self._clocks()
        return self._steps == self._due

    def sentence(self, workers: int | None, advice: str = "", share: float | None = None) -> str:
        """Says how little is used, and what the bottleneck is; "": neither, or the training is short. Collective.

        Args:
            workers: number of data workers; None: another number does not help.
            advice: advice for a training that waits for data, and that another number does not help.
            share: share of the time that waiting for data takes; None: that of the phase.
        """
        if self._steps < 2:
            return ""
        times = self._world.gather(self._times())
        if min(each.total for each in times) < LEAST_SECONDS:
            self._due *= 2
            return ""
        largest = bottleneck(times, workers, advice, share)
        return ": ".join(filter(None, [underused(times), largest.sentence if largest else ""]))

    def _times(self) -> RankTimes:
        spent = (now - before for now, before in zip(self._clocks(), self._before, strict=True))
        (processor, loading, workers, delayed, *phases), usage = spent, self._usage()
        return RankTimes(
            steps=self._steps - 1,
            phases={name: seconds for name, seconds in zip(PHASES, phases, strict=True) if name != PHASES[START]},
            processor=processor,
            loading=loading,
            workers=workers,
            delayed=delayed,
            threads=torch.get_num_threads(),
            own_cores=own_cores(self._world.process),
            host=usage.host,
            cores=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
            device=self._world.device.type,
            gpu=usage.gpu,
        )

    def _clocks(self) -> list[float]:
        """Reads the process's clocks: CPU seconds of its own, while it loads, of workers; delay; wall ones by phase."""
        own, delayed = time.process_time(), 0.0
        with contextlib.suppress(OSError, IndexError):  # not on macOS
            delayed = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        return [own, self._chronometer.loading, cpu_seconds() - own, delayed, *self._chronometer.spent()[1]]


def underused(times: Sequence[RankTimes]) -> str:
    """Says how little of the GPUs, or of a Slurm job's cores, is used, if sites warn of so little; "" if not."""
    gpus = [each.gpu for each in times if each.gpu is not None]
    if gpus:
        least, _, site = os.environ.get(WARNS, f"{JOBSTATS['gpu']} jobstats").partition(" ")
        share, names = statistics.mean(gpus), "the GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        warning = f"{names} computed {share:.0%} of the time, and {site} warns below {float(least):.0%}"
        return warning if share < float(least) else ""
    asked = int(os.environ.get("SLURM_CPUS_ON_NODE", "0")) * len({each.host for each in times})
    used, least = sum((each.processor + each.workers) / each.total for each in times), JOBSTATS["cpu"]
    if asked <= 1 or used >= least * asked or any(each.device != "cpu" for each in times):
        return ""
    return f"{used:.1f} of the job's {asked} cores computed, and jobstats warns below {least:.0%}"


def bottleneck(
    times: Sequence[RankTimes], workers: int | None, advice: str = "", share: float | None = None
) -> Bottleneck | None:
    """Finds in times by rank what would bring most if it were changed; None: nothing brings a tenth."""
    of_host = [_slow_process(times), _larger_batch(times), _threads(times), _binding(times) or _other_programs(times)]
    if any(each.device != "cpu" for each in times):
        of_host = []  # the host is ahead of a GPU, and waits in other phases than it
    causes = [_input(times, workers, advice, share), *_too_often(times), *of_host]
    worth = [cause for cause in causes if cause is not None and cause.faster >= WORTH]
    return max(worth, key=lambda cause: cause.faster, default=None)


def _input(times: Sequence[RankTimes], now: int | None, advice: str, share: float | None) -> Bottleneck:
    """The wait for data, and the number of workers that load as fast as the rest of a step, or as the cores can."""
    slowest = max(times, key=lambda each: each.share("data"))
    share = slowest.share("data") if share is None else share
    kind, says = "input", f"input-bound: waiting for data took {share:.0%} of the time"
    # Workers that cannot keep up load all the time; threads of this process compute in all of it, too.
    seconds, late = (now or share) * slowest.total, 1 + slowest.delayed / max(1e-9, slowest.processor)
    if late * (slowest.workers + slowest.loading * (1 / max(share, 0.01) if now else 1)) < STORAGE * seconds:
        kind, says = "storage", f"{says}, as storage is slow (grappe data stage)"
    if now is not None:
        rest, loads = slowest.total * (1 - share), slowest.workers if now else HANDED * slowest.steps
        cores = (slowest.processor + loads) / slowest.own_cores
        if slowest.threads >= slowest.own_cores:  # workers interrupt threads that have all cores, and wait for one
            rest += loads if kind == "storage" else min(loads, rest)
            seconds *= 2 if kind == "storage" else 1
        least = max(rest, cores, slowest.total / 32)  # more than 32 times is not believed
        workers = math.ceil(SPARE * seconds / least)
        saved = 1 - max(least, seconds / workers) / slowest.total
        if workers > now and saved > 1 - 1 / WORTH:
            return Bottleneck(kind, saved, f"{says}; workers={workers}")
        advice = "make a sample cheaper"
    return Bottleneck(kind, share, f"{says}; no wait", f": {advice}")


def _too_often(times: Sequence[RankTimes]) -> list[Bottleneck]:
    """Evaluations, saves and watchers. Saves are written in the background: few of them take no time of the steps."""
    evaluating, saving, watching = (max(each.share(phase) for each in times) for phase in PAUSES)
    return [
        Bottleneck("evaluation", evaluating / 2, f"evaluating took {evaluating:.0%} of the time: half as often"),
        Bottleneck("saving", min(saving, 0.9), f"saving took {saving:.0%} of the time: ten times less often"),
        Bottleneck("watching", watching * 0.9, f"watchers took {watching:.0%} of the time: ten times less often"),
    ]


def _slow_process(times: Sequence[RankTimes]) -> Bottleneck | None:
    """The process that computes longest, if the others wait about as long as it computes more than they do."""
    slowest = max(range(len(times)), key=lambda rank: times[rank].computing)
    late, others = times[slowest], [*times[:slowest], *times[slowest + 1 :]]
    if not others:
        return None
    usual, host = statistics.median(each.computing for each in others), late.host
    more, longer = late.computing - usual, late.computing / max(1e-9, usual)
    says = f"process {slowest} on {host} computes {longer:.1f} times as long as the others, which wait: a node as quick"
    waits = min(each.phases["communication"] for each in others) - late.phases["communication"]
    return Bottleneck("slow process", more / late.total, says) if waits >= more / 2 else None


def _larger_batch(times: Sequence[RankTimes]) -> Bottleneck | None:
    """Exchange of gradients and update, which take as long with a larger batch."""
    sent, update = (min(each.share(phase) for each in times) for phase in ("communication", "update"))
    kind, says = "small batches", f"updating the weights took {update:.0%} of the time: a batch twice as large"
    if sent > update:
        kind, says = "communication", f"exchanging gradients took {sent:.0%} of the time: a batch twice as large"
    cause = Bottleneck(kind, (sent + update) / 2, says, ", and changes what is learned", "at least ")
    return cause if cause.faster >= WORTH_MORE else None


def _threads(times: Sequence[RankTimes]) -> Bottleneck | None:
    """Fewer threads than cores, in processes whose threads all compute."""
    few = min(times, key=lambda each: each.threads / each.own_cores)
    free, busy = math.floor(few.own_cores - few.workers / few.total + 0.1), few.processor - few.loading + few.delayed
    if busy < BUSY * few.computing * few.threads or few.computing < THREADED * few.steps:
        return None
    saved, says = 1 - few.threads / max(1, free), f"{few.threads} of {few.own_cores} cores compute: threads={free}"
    return Bottleneck("threads", few.computing / few.total * saved, says, "", "at most ")


def _binding(times: Sequence[RankTimes]) -> Bottleneck | None:
    """Processes of a node that are bound to fewer cores than they are."""
    for host in dict.fromkeys(each.host for each in times):
        bound = [each for each in times if each.host == host]
        cores, count = len(frozenset[int]().union(*(each.cores for each in bound))), len(bound)
        if 0 < cores < count:
            says = f"{count} processes on {host} may run on {cores} of its cores: a core for each (--cpus-per-task)"
            busy = min(1.0, sum(each.processor / each.total for each in bound) / cores)
            # Two cores of the system may be the threads of one, which bring less.
            return Bottleneck("binding", busy * (1 - cores / count), says, "", "at most ")
    return None


def _other_programs(times: Sequence[RankTimes]) -> Bottleneck | None:
    """A process that waits for a core, which the training's own threads and workers do not have."""
    late = max(times, key=lambda each: each.delayed / each.total)
    of_host = [each for each in times if each.host == late.host]
    if statistics.mean((each.processor + each.workers) / each.total / each.own_cores for each in of_host) > BUSY:
        return None
    lost = late.delayed / late.total
    says = f"other programs had its cores for {lost:.0%} of the time: cores of its own"
    cause = Bottleneck("other programs", lost, says)
    return cause if cause.faster >= WORTH_MORE else None
