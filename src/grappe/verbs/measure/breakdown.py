"""Time breakdown: splits a step's time into parts that add up to all of it; the last is useful computing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from grappe.parallel.pipeline.rules import idle_part
from grappe.plan import Plan
from grappe.profiling.operators import OperatorTotals
from grappe.verbs.measure.points import Measurement, ProcessTimes, TimedRun

PARTS = (
    "evaluation",
    "checkpoints",
    "watching",
    "waiting for data",
    "transfers",
    "imbalance",
    "pipeline bubble",
    "copies for messages",
    "exposed communication",
    "update",
    "values read by the host",
    "host between kernels",
    "copies of layouts",
    "memory-bound operators",
    "small matrices",
    "precision not used",
    "not explained",
    "useful compute",
)
"""In the order in which they are taken off; what is left at the end is useful."""
USEFUL = PARTS[-1]
FORWARD_BACKWARD = PARTS[PARTS.index("values read by the host") :]
"""Parts of forward and backward."""
UNUSED = "precision not used"
LEAST_PRECISION = 0.05  # of matrix products' time, below which another precision is no gain


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTrace:
    """Times of one process of a traced training."""

    operators: OperatorTotals | None
    computing: float
    """Seconds of forward and backward, by the host's clock, in steps of the same process that were not traced."""
    evaluation: float
    """Seconds of an evaluation."""
    checkpoint: float
    """Seconds that the training waits for a save."""
    gradients: int
    """Bytes of the gradients on this process."""
    largest: tuple[str, int]
    """Name and bytes of the largest of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTrace:
    """The processes of a traced training."""

    processes: tuple[ProcessTrace, ...]
    reachable: Mapping[str, float]
    """Measured FLOP/s of a large matrix product, by precision that the device has units for."""
    steps_per_epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """Steps between evaluations, and between saves."""

    evaluation: int
    save: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """The parts of a step's time under one plan; evaluations and saves are spread over the steps between them."""

    plan: str
    batch: int
    seconds: float
    """Of a step, with its share of evaluations and saves."""
    parts: Mapping[str, float]
    """Seconds by part, all of PARTS; their sum is `seconds`."""
    precision: str
    """The precision in which matrix products are quickest on this device."""
    intervals: Intervals
    trace: RunTrace

    def share(self, part: str) -> float:
        """Returns the part's share of the time, 0 to 1."""
        return self.parts[part] / self.seconds


def break_down(point: Measurement, trace: RunTrace, intervals: Intervals) -> TimeBreakdown:
    """Splits the time of a measured plan.

    Shares come from steps that nothing traced; the trace says only how forward and backward divide.
    """
    timed, plan = point.middle(), Plan.parse(point.plan)
    if len(timed.processes) == 1 or plan.pipeline > 1:
        counted = timed.processes
    else:  # the others wait for the slowest: their time is split
        slow = max(timed.processes, key=lambda process: process.busy)
        counted = [process for process in timed.processes if process is not slow]
    phases = {
        name: statistics.fmean(process.phases[name] for process in counted) for name in counted[0].phases
    }
    parts = dict.fromkeys(PARTS, 0.0)
    parts["evaluation"] = max(seen.evaluation for seen in trace.processes) / intervals.evaluation
    parts["checkpoints"] = max(seen.checkpoint for seen in trace.processes) / intervals.save
    parts["watching"], parts["update"] = phases["watching"], phases["update"]
    parts["waiting for data"], parts["transfers"] = phases["data"], phases["transfer"]
    parts |= _waits(timed, counted, phases["communication"], plan)
    computing = phases["forward"] + phases["backward"]
    traced = [trace.processes[process.rank] for process in counted]
    operators = [seen.operators for seen in traced if seen.operators is not None]
    precision = plan.precision
    if operators:
        mean = {
            name: statistics.fmean(getattr(totals, name) for totals in operators)
            for name in (
                "launches",
                "messages",
                "matrix",
                "copies",
                "casts",
                "elementwise",
                "host",
                "reads",
                "flops",
            )
        }
        untraced = statistics.fmean(seen.computing for seen in traced)
        if operators[0].clock == "host" and untraced:
            # Another process has another pace: by where its memory lies, or by what else its machine does.
            mean = {
                name: value if name == "flops" else value * computing / untraced
                for name, value in mean.items()
            }
        launching = min(computing, mean["launches"])
        copied = min(parts["exposed communication"], mean["messages"])
        parts["copies for messages"] = copied
        parts["exposed communication"] += launching - copied
        split, precision = _split_computing(
            computing - launching, mean, trace.reachable, plan.precision, operators[0].clock
        )
        parts |= split
        if plan.compile:  # kernels that were fused are no operators
            parts["not explained"] += parts["host between kernels"]
            parts["host between kernels"] = 0.0
    else:
        parts["not explained"] = computing
    return TimeBreakdown(
        plan=point.plan,
        batch=point.batch,
        seconds=sum(parts.values()),
        parts=parts,
        precision=precision,
        intervals=intervals,
        trace=trace,
    )


def _waits(timed: TimedRun, counted: Sequence[ProcessTimes], waited: float, plan: Plan) -> dict[str, float]:
    """Splits the time in which processes wait for others.

    A pipeline of p processes with work c each in m microbatches takes c + (p-1) c / m. With unequal work, of mean
    c, the largest sets the pace, and the others fill it once: max + (p c - max) / m. What equal work would save, which
    is (max - c) (1 - 1 / m), is imbalance; what would then remain, (p-1) c / m, is the bubble.
    """
    if plan.pipeline > 1:
        work = [process.phases["forward"] + process.phases["backward"] for process in timed.processes]
        mean, bubble = statistics.fmean(work), idle_part(plan)
        imbalance = min(waited, (max(work) - mean) * (1 - bubble / (plan.pipeline - 1)))
        idle = min(waited - imbalance, mean * bubble)
    else:
        longest = max(process.busy for process in timed.processes)
        mean = statistics.fmean(process.busy for process in counted)
        imbalance, idle = min(waited, longest - mean), 0.0
    return {
        "imbalance": imbalance,
        "pipeline bubble": idle,
        "exposed communication": waited - imbalance - idle,
    }


def _split_computing(
    seconds: float, mean: Mapping[str, float], reachable: Mapping[str, float], precision: str, clock: str
) -> tuple[dict[str, float], str]:
    """Splits forward and backward of `seconds`; returns the parts, and the quickest precision.

    Kernels take longer under a trace, which uses the caches, too: where they take more than `seconds` they are scaled.
    The host has what they leave: on a CPU at most what the trace saw of it, on a GPU all, as kernels run beside it.

    Args:
        mean: the processes' OperatorTotals, by field.
        reachable: FLOP/s of a large matrix product, by precision.
    """
    kernels = mean["matrix"] + mean["copies"] + mean["casts"] + mean["elementwise"]
    scale = min(1.0, seconds / kernels) if kernels else 1.0
    rest = max(0.0, seconds - kernels)
    host = rest if clock == "device" else min(rest, mean["host"])
    reading = host * mean["reads"] / mean["host"] if mean["host"] else 0.0
    matrix, flops = mean["matrix"] * scale, mean["flops"]
    best = max(reachable, key=lambda name: reachable[name])
    saved = min(matrix, flops / reachable[precision] - flops / reachable[best])
    if saved <= LEAST_PRECISION * matrix:
        best, saved = precision, 0.0
    useful = min(matrix - saved, flops / reachable[best])
    return {
        "values read by the host": reading,
        "host between kernels": host - reading,
        "copies of layouts": mean["copies"] * scale,
        "memory-bound operators": (mean["casts"] + mean["elementwise"]) * scale,
        "small matrices": matrix - saved - useful,
        UNUSED: saved,
        "not explained": rest - host,
        USEFUL: useful,
    }, best
