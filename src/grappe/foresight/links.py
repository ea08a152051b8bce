"""Links: what messages between processes of this machine take, measured at a few sizes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from grappe.launch.rank import ProcessRank
from grappe.plan import Plan

SIZES = (256, 16 << 10, 256 << 10, 2 << 20, 16 << 20)
"""Bytes of the whole message: what an all-reduce sums, an all-gather gathers, a reduce-scatter reduces."""
SECONDS = 0.25  # for each size of each collective
TIMES = (5, 100)
PATIENCE = timedelta(seconds=60)
MEETING = "meeting"
"""Of processes that compute side by side and meet: seconds of computing, and of waiting for the slowest."""
SIDE, MEETINGS = 384, 60
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkRequest:
    """The number of processes, on its way to them."""

    processes: int
    run: None = None


def worker(
    request: LinkRequest, process: ProcessRank, rendezvous_folder: Path
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Measures each collective at each size. Collective."""
    from grappe.launch.world import join

    world = join(Plan(replicate=request.processes, threads=1), process, rendezvous_folder, PATIENCE)
    found = {}
    for name in COLLECTIVES:
        took = [_seconds(_collective(name, size, request.processes, world.rank)) for size in SIZES]
        # A small message cannot take longer than a larger one: what is above that was disturbed.
        least = reversed(list(itertools.accumulate(reversed(took), min)))
        found[name] = tuple(zip(map(float, SIZES), least, strict=True))
    found[MEETING] = (_meeting(),)
    world.leave()
    return found


def seconds(points: Points, size: float) -> float:
    """Computes the seconds of a message of `size` bytes: on straight lines between the measured sizes."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(1, bisect.bisect([one for one, _ in points], size)), len(points) - 1)
    (low, fast), (high, slow) = points[place - 1], points[place]
    return max(0.0, fast + (slow - fast) * (size - low) / (high - low))


def _collective(name: str, size: int, processes: int, rank: int) -> Callable[[], object]:
    import torch.distributed as dist

    from grappe.launch.world import gather_into

    numbers = max(processes, size // 4 // processes * processes)
    whole, part = torch.ones(numbers), torch.ones(numbers // processes)
    group = dist.group.WORLD
    assert group is not None

    def send() -> None:  # as far as processes form pairs
        other = rank ^ 1
        if other < processes:
            dist.send(whole, other) if rank < other else dist.recv(whole, other)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather_into(whole, part, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": send,
    }[name]


def _meeting() -> tuple[float, float]:
    """Measures how long processes that compute the same wait for each other, however short the message is."""
    import torch.distributed as dist

    a, flag, computed, waited = torch.ones(SIDE, SIDE), torch.ones(1), [], []
    for _ in range(MEETINGS):
        began = time.perf_counter()
        for _ in range(20):
            a = (a @ a).clamp_(-1, 1)
        met = time.perf_counter()
        dist.all_reduce(flag)
        computed.append(met - began)
        waited.append(time.perf_counter() - met)
    return statistics.median(computed), statistics.fmean(waited)


def _seconds(collective: Callable[[], object]) -> float:
    """Measures the median seconds of a collective; every process makes the same number of calls."""
    import torch.distributed as dist

    began = time.perf_counter()
    for _ in range(2):
        collective()
    each = torch.tensor((time.perf_counter() - began) / 2)
    dist.all_reduce(each, op=dist.ReduceOp.MAX)
    found = []
    for _ in range(max(TIMES[0], min(TIMES[1], int(SECONDS / float(each))))):
        began = time.perf_counter()
        collective()
        found.append(time.perf_counter() - began)
    return statistics.median(found)
