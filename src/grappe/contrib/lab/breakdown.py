"""Splits a step's time into parts that add up to all of it; for each the remedy that moves it, and its gain."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from grappe.contrib.lab.operators import LineCost
from grappe.plan import Plan
from grappe.verbs.measure.points import Measurement
from grappe.verbs.measure.verdict import MOST_WORKERS, advised_workers

USEFUL = "useful compute"
UNUSED = "precision not used"
SMALL_BATCH = "small batch"
"""Gain of a larger batch, as measured: of host, small kernels and update together, so no part of the sum."""
LEAST_PRECISION = 0.05  # of matrix products' time, below which another precision is no gain
WORTH = 0.02  # share of the time, from which on a part has a remedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Operators of a traced training."""

    processes: tuple[tuple[LineCost, ...], ...]
    """Costs per step, by rank."""
    reachable: Mapping[str, float]
    """Measured FLOP/s of a large matrix product, by precision that the device has units for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, and the share of the time that it saves."""

    part: str
    """One of RULES, or SMALL_BATCH."""
    word: str
    """The change: a plan's key, an option, or a line of the user's."""
    saves: float = 0.0
    """Share of the time, 0 to 1, at most; 0: how much is not known."""

    @property
    def gain(self) -> str:
        """Formats the gain as a factor of the rate, of this change alone: factors of several do not multiply."""
        return f"up to {1 / max(0.001, 1 - self.saves):.3g}x" if self.saves else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """The parts of a step's time under one plan, and what would make it shorter."""

    plan: str
    batch: int
    seconds: float = 0.0
    """Seconds of a step."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Shares of a step by part, all of RULES and USEFUL; they add up to 1."""
    precision: str = ""
    """The precision in which matrix products are quickest on this device."""
    remedies: Sequence[Remedy] = ()
    """The largest saving first."""
    failure: str = ""
    """The reason why the steps could not be traced."""


def break_down(point: Measurement, trace: TracedRun, points: Sequence[Measurement] = ()) -> TimeBreakdown:
    """Splits the time of a measured plan.

    Shares come from steps that nothing traced; the trace says only how forward and backward divide. Kernels take longer
    under a trace, which uses the caches, too: where they take more than those steps they are scaled. The rest is the
    host's: on a CPU at most its time in the trace, on a GPU all, as it works while kernels run.

    Args:
        points: all measurements; one may have a larger batch.
    """
    processes, plan = point.middle().processes, Plan.parse(point.plan)
    counted = list(processes)
    if len(counted) > 1 and plan.pipeline == 1:  # the others wait for the slowest: their time is split
        counted.remove(max(processes, key=lambda process: process.busy))
    phases = {name: statistics.fmean(process.phases[name] for process in counted) for name in counted[0].phases}
    costs = [cost for process in counted for cost in trace.processes[process.rank]]
    flops = sum(cost.flops for cost in costs) / len(counted)
    matrix, copies, collectives, kernels = (
        sum(cost.kernel for cost in costs if not kind or cost.kind == kind) / len(counted)
        for kind in ("matrix", "copy", "collective", "")
    )
    traced = sum(cost.host for cost in costs) / len(counted)
    computing = phases["forward"] + phases["backward"]
    rest = max(0.0, computing - kernels)
    host = rest if point.device != "cpu" and kernels else min(rest, traced)
    reading = {cost.line for cost in costs if cost.kind == "read" and cost.line}
    reads = host * sum(cost.host for cost in costs if cost.line in reading) / (traced or 1.0) / len(counted)
    scale = min(1.0, computing / (kernels or 1.0))
    matrix, collectives, copies = matrix * scale, collectives * scale, copies * scale
    best = max(trace.reachable, key=lambda name: trace.reachable[name])
    saved = min(matrix, flops / trace.reachable[plan.precision] - flops / trace.reachable[best])
    if saved <= LEAST_PRECISION * matrix:
        best, saved = plan.precision, 0.0
    useful = min(matrix - saved, flops / trace.reachable[best])
    between = 0.0 if plan.compile else host - reads  # kernels that were fused are no operators
    seconds = {
        "waiting for data": phases["data"] + phases["transfer"],
        "waiting for other processes": phases["communication"] + collectives,
        "update and watching": phases["update"] + phases["watching"],
        "values read by the host": reads,
        "host between kernels": between,
        "copies of layouts": copies,
        "small or memory-bound kernels": kernels * scale - collectives - copies - saved - useful,
        UNUSED: saved,
        "not explained": rest - reads - between,
        USEFUL: useful,
    }
    total = sum(seconds.values())
    breakdown = TimeBreakdown(
        plan=point.plan,
        batch=point.batch,
        seconds=total,
        parts={part: each / total for part, each in seconds.items()},
        precision=best,
    )
    return dataclasses.replace(breakdown, remedies=_remedies(breakdown, Step(point, plan, trace.processes[0]), points))


class Step(NamedTuple):
    """The step that a rule finds a remedy for: its measurement, its plan, and the operators of process 0."""

    point: Measurement
    plan: Plan
    costs: Sequence[LineCost]

    def largest(self, kind: str, by: str) -> LineCost:
        """Finds the user's line with the largest cost of a kind ("": of any); an empty one if there is none."""
        lines = [cost for cost in self.costs if cost.line and kind in ("", cost.kind)]
        return max(lines, key=lambda cost: getattr(cost, by), default=LineCost())


def _remedies(breakdown: TimeBreakdown, step: Step, points: Sequence[Measurement]) -> list[Remedy]:
    """Finds the remedies, the one with the largest saving first."""
    remedies, point = [], step.point
    larger = [other for other in points if not other.failure and other.plan == point.plan and other.batch > point.batch]
    best = max(larger, key=lambda other: other.rate, default=point)
    if (saves := 1 - point.rate / best.rate) >= WORTH:
        word = f"batch_size={best.batch} (tried; it changes what is learned)"
        remedies.append(Remedy(part=SMALL_BATCH, word=word, saves=saves))
    for part, rule in RULES.items():
        if (share := breakdown.parts[part]) >= WORTH:
            remedies.append(Remedy(part=part, word=rule(breakdown, step), saves=0.0 if part in UNKNOWN else share))
    return sorted(remedies, key=lambda remedy: -remedy.saves)


def _data(breakdown: TimeBreakdown, step: Step) -> str:
    needed = advised_workers(step.point) or math.inf
    return f"workers={needed}" if needed <= MOST_WORKERS else "a cheaper transform, or samples stored decoded"


def _others(breakdown: TimeBreakdown, step: Step) -> str:
    if step.plan.pipeline > 1:
        return f"microbatches={2 * step.plan.microbatches}, or stages of more even work (cuts)"
    slow, more, where = step.point.slowest()
    if more > breakdown.parts["waiting for other processes"] * breakdown.seconds / 2:
        return f"process {slow.rank} on {slow.host} has {more * 1e3:.3g} ms more a step, most of it in {where}"
    return "a larger batch_size, or fewer processes"


def _reads(breakdown: TimeBreakdown, step: Step) -> str:
    most = step.largest("read", "calls")
    often = f"{most.calls:,.0f} times a step"
    return f"{_place(most)} reads values (.item(), float(), .tolist()) {often}: keep them tensors"


def _host(breakdown: TimeBreakdown, step: Step) -> str:
    most, count = step.largest("", "host"), sum(cost.calls for cost in step.costs)
    where = f", {most.calls:,.0f} of them at {_place(most)}" if most.line else ""  # backward has no line
    return f"{count:,.0f} operators a step{where}: fewer, larger ones, or compile"


def _copies(breakdown: TimeBreakdown, step: Step) -> str:
    most = step.largest("copy", "kernel")
    return f"a layout is copied each step{f' at {_place(most)}' if most.line else ''}: make it once, in data()"


RULES: Mapping[str, Callable[[TimeBreakdown, Step], str]] = {
    "waiting for data": _data,
    "waiting for other processes": _others,
    "update and watching": lambda *_: "a larger batch_size makes updates rarer; shard= with zero=1 splits them",
    "values read by the host": _reads,
    "host between kernels": _host,
    "copies of layouts": _copies,
    "small or memory-bound kernels": lambda *_: "compile, a larger batch_size, or wider layers",
    UNUSED: lambda breakdown, _: f"precision={breakdown.precision}",
    "not explained": lambda _, step: (
        "compiled kernels: --profile shows them" if step.plan.compile else "measure again, while nothing else runs here"
    ),
}
"""The change by part."""
UNKNOWN = frozenset({"update and watching", "small or memory-bound kernels", "not explained"})
"""Parts of which a remedy saves a share that is not known."""


def _place(cost: LineCost) -> str:
    """Formats a line of the user's: `my_task.py:41`."""
    file, _, number = cost.line.rpartition(":")
    return f"{Path(file).name}:{number}"
