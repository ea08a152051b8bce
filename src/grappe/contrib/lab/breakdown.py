"""Splits a step's time into parts that add up to all of it; for each the remedy that moves it, and its gain."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from grappe.contrib.lab.operators import LineCost, OperatorTotals
from grappe.data.loading import workers_needed
from grappe.parallel.pipeline.rules import idle_part
from grappe.plan import Plan
from grappe.verbs.measure.points import Measurement, ProcessTimes, TimedRun
from grappe.verbs.measure.verdict import MOST_WORKERS

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
UNUSED = "precision not used"
LEAST_PRECISION = 0.05  # of matrix products' time, below which another precision is no gain
WORTH = 0.02  # share of the time, from which on a part has a remedy
ENOUGH = 0.05  # share of the time that evaluations, or saves, may well take
MOST_OF = 0.5  # of a sum, to be named as its cause
SMALL_BATCH = "small batch"
"""Gain of a larger batch, as measured: of host, small matrices and update together, so no part of the sum."""


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
    steps_per_epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTrace:
    """The processes of a traced training."""

    processes: tuple[ProcessTrace, ...]
    reachable: Mapping[str, float]
    """Measured FLOP/s of a large matrix product, by precision that the device has units for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """The parts of a step's time under one plan; evaluations and saves are spread over the steps between them."""

    seconds: float
    """Seconds of a step, with its share of evaluations and saves."""
    parts: Mapping[str, float]
    """Seconds by part, all of PARTS; their sum is `seconds`."""
    precision: str
    """The precision in which matrix products are quickest on this device."""
    evaluate_every: int
    save_every: int
    trace: RunTrace

    def share(self, part: str) -> float:
        """Returns the part's share of the time, 0 to 1."""
        return self.parts[part] / self.seconds


def break_down(point: Measurement, trace: RunTrace, evaluate_every: int, save_every: int) -> TimeBreakdown:
    """Splits the time of a measured plan.

    Shares come from steps that nothing traced; the trace says only how forward and backward divide.
    """
    timed, plan = point.middle(), Plan.parse(point.plan)
    if len(timed.processes) == 1 or plan.pipeline > 1:
        counted = timed.processes
    else:  # the others wait for the slowest: their time is split
        slow = max(timed.processes, key=lambda process: process.busy)
        counted = [process for process in timed.processes if process is not slow]
    phases = {name: statistics.fmean(process.phases[name] for process in counted) for name in counted[0].phases}
    parts = dict.fromkeys(PARTS, 0.0)
    parts["evaluation"] = max(seen.evaluation for seen in trace.processes) / evaluate_every
    parts["checkpoints"] = max(seen.checkpoint for seen in trace.processes) / save_every
    parts["watching"], parts["update"] = phases["watching"], phases["update"]
    parts["waiting for data"], parts["transfers"] = phases["data"], phases["transfer"]
    parts |= _waits(timed, counted, phases["communication"], plan)
    computing = phases["forward"] + phases["backward"]
    traced = [trace.processes[process.rank] for process in counted]
    operators = [seen.operators for seen in traced if seen.operators is not None]
    precision = plan.precision
    if operators:
        names = [name for name, value in vars(operators[0]).items() if isinstance(value, float)]
        mean = {name: statistics.fmean(getattr(totals, name) for totals in operators) for name in names}
        untraced = statistics.fmean(seen.computing for seen in traced)
        if operators[0].clock == "host" and untraced:
            # Processes differ in pace: by where their memory lies, or by what else their machine does.
            mean = {name: value * (computing / untraced if name != "flops" else 1) for name, value in mean.items()}
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
        seconds=sum(parts.values()),
        parts=parts,
        precision=precision,
        evaluate_every=evaluate_every,
        save_every=save_every,
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
    return {"imbalance": imbalance, "pipeline bubble": idle, "exposed communication": waited - imbalance - idle}


def _split_computing(
    seconds: float, mean: Mapping[str, float], reachable: Mapping[str, float], precision: str, clock: str
) -> tuple[dict[str, float], str]:
    """Splits forward and backward of `seconds`; returns the parts, and the quickest precision.

    Kernels take longer under a trace, which uses the caches, too: where they take more than `seconds` they are scaled.
    The rest is the host's: on a CPU at most its time in the trace, on a GPU all, as it works while kernels run.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, and the share of the time that it saves."""

    part: str
    """One of PARTS, or SMALL_BATCH."""
    word: str
    """The change: a plan's key, an option, or a line of the user's."""
    saves: float = 0.0
    """Share of the time, 0 to 1; 0: how much is not known."""
    at_most: bool = False
    """Whether that is an upper bound."""

    @property
    def gain(self) -> float:
        """Computes by how much more samples are trained in the same time: 0.25, a quarter more."""
        return self.saves / (1 - self.saves) if self.saves < 1 else math.inf

    @property
    def speed_up(self) -> str:
        """Formats the gain as a factor of the rate, of this change alone: factors of several do not multiply."""
        return f"up to {1 + self.gain:.3g}x" if self.saves else ""


class PartRule(NamedTuple):
    """A remedy that moves a part of the time."""

    word: Callable[[TimeBreakdown, Measurement, Plan], str]
    """The change; "": there is none."""
    saves: float = 1.0
    """Share of the part that it saves; 0: how much is not known."""
    at_most: bool = False


def remedies(breakdown: TimeBreakdown, point: Measurement, points: Sequence[Measurement]) -> list[Remedy]:
    """Returns the remedies, the one with the largest saving first.

    Args:
        point: the measurement that was broken down.
        points: all measurements; one may have a larger batch.
    """
    remedies = []
    for part, interval, option in (
        ("evaluation", breakdown.evaluate_every, "--evaluate-every"),
        ("checkpoints", breakdown.save_every, "--save-every"),
    ):  # so rare that they take ENOUGH of the time
        seconds, share = breakdown.parts[part], breakdown.share(part)
        if share >= WORTH:
            enough = math.ceil(seconds * interval / (ENOUGH * (breakdown.seconds - seconds)))
            saves = share * (1 - interval / enough)
            if saves >= WORTH:
                remedies.append(Remedy(part=part, word=f"{option} {enough}", saves=saves))
    larger = [other for other in points if not other.failure and other.plan == point.plan and other.batch > point.batch]
    if larger:
        best = max(larger, key=lambda other: other.rate)
        # Evaluations and saves stay as they are.
        step = breakdown.seconds - breakdown.parts["evaluation"] - breakdown.parts["checkpoints"]
        saves = (1 - point.rate / best.rate) * step / breakdown.seconds
        if saves >= WORTH:
            word = f"batch_size={best.batch} (tried; it changes what is learned)"
            remedies.append(Remedy(part=SMALL_BATCH, word=word, saves=saves))
    plan = Plan.parse(point.plan)
    for part, rule in RULES.items():
        share = breakdown.share(part)
        if share >= WORTH and (word := rule.word(breakdown, point, plan)):
            remedies.append(Remedy(part=part, word=word, saves=share * rule.saves, at_most=rule.at_most))
    return sorted(remedies, key=lambda remedy: -remedy.saves)


def _data(breakdown: TimeBreakdown, point: Measurement, plan: Plan) -> str:
    if point.workers is None:
        return "the samples are in memory: a cheaper transform or augment"
    needed = workers_needed(breakdown.share("waiting for data"), point.workers)
    if point.workers < needed <= MOST_WORKERS:
        return f"workers={needed}"
    return "store the samples decoded and smaller"


def _imbalance(breakdown: TimeBreakdown, point: Measurement, plan: Plan) -> str:
    if plan.pipeline > 1:
        work = [process.phases["forward"] + process.phases["backward"] for process in point.middle().processes]
        most = max(range(len(work)), key=lambda rank: work[rank])
        return (
            f"the stages of process {most} have {work[most] * len(work) / sum(work):.1f} times the mean work: "
            "cut elsewhere (cuts), or into smaller units"
        )
    slow, more, where = point.slowest()
    return f"process {slow.rank} on {slow.host} has {more * 1e3:.3g} ms more a step, most of it in {where}"


def _communication(breakdown: TimeBreakdown, point: Measurement, plan: Plan) -> str:
    process = breakdown.trace.processes[0]
    name, size = process.largest
    if plan.data_parallel == 1 and plan.pipeline > 1:
        return "cut where less is sent from stage to stage (cuts)"
    if plan.data_parallel == 1:
        return "a smaller tensor=: each layer that is split waits for the others' parts"
    if size > MOST_OF * process.gradients:
        return (
            f"the gradient of {name} is {size / process.gradients:.0%} of all bytes, and is sent in one piece: "
            "split that parameter, so that sending overlaps with backward"
        )
    return "a larger batch_size, or fewer processes"


def _reads(breakdown: TimeBreakdown, point: Measurement, plan: Plan) -> str:
    totals = breakdown.trace.processes[0].operators
    if totals is None or not totals.read_lines:
        return ""
    most = totals.read_lines[0]
    times = f"{most.calls:,.0f} time{'s' if most.calls > 1 else ''} a step"
    return f"{place(most)} reads values (.item(), float(), .tolist()) {times}: keep them tensors"


def _host(breakdown: TimeBreakdown, point: Measurement, plan: Plan) -> str:
    totals = breakdown.trace.processes[0].operators
    if totals is None:
        return ""
    word = f"{totals.operators:,.0f} operators a step"
    most = next((cost for cost in totals.host_lines if cost.line), None)  # backward has none
    if most is not None and most.seconds > MOST_OF / 2 * sum(cost.seconds for cost in totals.host_lines):
        word += f", {most.calls:,.0f} of them at {place(most)}"
    return word + ": fewer, larger ones" + ("" if plan.compile else ", or compile")


def _copies(breakdown: TimeBreakdown, point: Measurement, plan: Plan) -> str:
    totals = breakdown.trace.processes[0].operators
    most = totals.copy_lines[0] if totals and totals.copy_lines else None
    where = f" at {place(most)}" if most is not None and most.line else ""
    return f"a layout is copied each step{where}: make it once, in data()"


RULES = {
    "watching": PartRule(lambda *_: "fewer or cheaper loggers and watchers", at_most=True),
    "waiting for data": PartRule(_data),
    "transfers": PartRule(lambda *_: "send smaller types (bytes, not floats), and convert on the device"),
    "imbalance": PartRule(_imbalance),
    "pipeline bubble": PartRule(lambda _, __, plan: f"microbatches={2 * plan.microbatches}", saves=0.5),
    "copies for messages": PartRule(
        lambda *_: "a larger batch_size makes them rarer; one process needs none", saves=0.0
    ),
    "exposed communication": PartRule(_communication, at_most=True),
    "update": PartRule(
        lambda _, __, plan: (
            "a larger batch_size makes updates rarer"
            + ("; shard= with zero=1 splits them" if plan.replicate > 1 else "")
        ),
        saves=0.0,
    ),
    "values read by the host": PartRule(_reads),
    "host between kernels": PartRule(_host, at_most=True),
    "copies of layouts": PartRule(_copies),
    "memory-bound operators": PartRule(
        lambda _, __, plan: "" if plan.compile else "compile fuses some of them", at_most=True
    ),
    "small matrices": PartRule(lambda *_: "a larger batch_size, or wider layers", saves=0.0),
    UNUSED: PartRule(lambda breakdown, *_: f"precision={breakdown.precision}", at_most=True),
    "not explained": PartRule(
        lambda _, __, plan: (
            "kernels that compile fused are in here: --profile shows them"
            if plan.compile
            else "measure again, while nothing else runs here"
        ),
        saves=0.0,
    ),
}


def place(cost: LineCost) -> str:
    """Formats a line of the user's: `my_task.py:41`."""
    file, _, number = cost.line.rpartition(":")
    return f"{Path(file).name}:{number}"
