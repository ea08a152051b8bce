"""Remedies: for each part of a time breakdown, the plan's word or the line of code that moves it, and its gain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grappe.data.loading import workers_needed
from grappe.plan import Plan
from grappe.profiling.operators import LineCost, OperatorTotals
from grappe.verbs.measure.breakdown import UNUSED, TimeBreakdown
from grappe.verbs.measure.points import Measurement
from grappe.verbs.measure.verdict import MOST_WORKERS, slow_process

WORTH = 0.02  # share of the time, from which on a part has a remedy
ENOUGH = 0.05  # share of the time that evaluations, or saves, may well take
MOST_OF = 0.5  # of a sum, to be named as its cause
SMALL_BATCH = "small batch"
"""What a larger batch brings, as measured: of host, small matrices and update together, so no part of the sum."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartRule:
    """A remedy that moves a part of the time."""

    word: Callable[[TimeBreakdown, Measurement], str]
    """The change; "": there is none."""
    saves: float = 1.0
    """Share of the part that it saves; 0: how much is not known."""
    at_most: bool = False


def remedies(breakdown: TimeBreakdown, point: Measurement, points: Sequence[Measurement]) -> list[Remedy]:
    """Returns the remedies, that with the largest saving first.

    Args:
        point: the measurement that was broken down.
        points: all measurements, of which one may have a larger batch.
    """
    remedies = [*_less_often(breakdown), *_larger_batch(breakdown, point, points)]
    for part, rule in RULES.items():
        share = breakdown.share(part)
        if share >= WORTH and (word := rule.word(breakdown, point)):
            remedies.append(Remedy(part=part, word=word, saves=share * rule.saves, at_most=rule.at_most))
    return sorted(remedies, key=lambda remedy: -remedy.saves)


def _less_often(breakdown: TimeBreakdown) -> Iterator[Remedy]:
    """Yields the options that make evaluations, and saves, so rare that they take ENOUGH of the time."""
    intervals = breakdown.intervals
    for part, interval, option in (
        ("evaluation", intervals.evaluation, "--evaluate-every"),
        ("checkpoints", intervals.save, "--save-every"),
    ):
        seconds = breakdown.parts[part]
        if breakdown.share(part) < WORTH:
            continue
        enough = math.ceil(seconds * interval / (ENOUGH * (breakdown.seconds - seconds)))
        saves = breakdown.share(part) * (1 - interval / enough)
        if saves >= WORTH:
            yield Remedy(part=part, word=f"{option} {enough}", saves=saves)


def _larger_batch(
    breakdown: TimeBreakdown, point: Measurement, points: Sequence[Measurement]
) -> Iterator[Remedy]:
    """Compares with a larger batch under the same plan, if one was measured."""
    larger = [
        other
        for other in points
        if not other.failure and other.plan == point.plan and other.batch > point.batch
    ]
    if not larger:
        return
    best = max(larger, key=lambda other: other.rate)
    # Evaluations and saves stay as they are.
    step = breakdown.seconds - breakdown.parts["evaluation"] - breakdown.parts["checkpoints"]
    saves = (1 - point.rate / best.rate) * step / breakdown.seconds
    if saves >= WORTH:
        yield Remedy(
            part=SMALL_BATCH,
            word=f"batch_size={best.batch} (tried; it changes what is learned)",
            saves=saves,
        )


def _data(breakdown: TimeBreakdown, point: Measurement) -> str:
    if point.workers is None:
        return "the samples are in memory: a cheaper transform or augment"
    needed = workers_needed(breakdown.share("waiting for data"), point.workers)
    if point.workers < needed <= MOST_WORKERS:
        return f"workers={needed}"
    return "store the samples decoded and smaller"


def _imbalance(breakdown: TimeBreakdown, point: Measurement) -> str:
    if Plan.parse(breakdown.plan).pipeline > 1:
        work = [
            process.phases["forward"] + process.phases["backward"] for process in point.middle().processes
        ]
        most = max(range(len(work)), key=lambda rank: work[rank])
        return (
            f"the stages of process {most} have {work[most] * len(work) / sum(work):.1f} times the mean work: "
            "cut elsewhere (cuts), or into smaller units"
        )
    slow, more, where = slow_process(point)
    return f"process {slow.rank} on {slow.host} has {more * 1e3:.3g} ms more a step, most of it in {where}"


def _communication(breakdown: TimeBreakdown, point: Measurement) -> str:
    process, plan = breakdown.trace.processes[0], Plan.parse(breakdown.plan)
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


def _update(breakdown: TimeBreakdown, point: Measurement) -> str:
    split = "; shard= with zero=1 splits them" if Plan.parse(breakdown.plan).replicate > 1 else ""
    return f"a larger batch_size makes updates rarer{split}"


def _reads(breakdown: TimeBreakdown, point: Measurement) -> str:
    totals = _operators(breakdown)
    if totals is None or not totals.read_lines:
        return ""
    most = totals.read_lines[0]
    times = f"{most.calls:,.0f} time{'s' if most.calls > 1 else ''} a step"
    return f"{place(most)} reads values (.item(), float(), .tolist()) {times}: keep them tensors"


def _host(breakdown: TimeBreakdown, point: Measurement) -> str:
    totals = _operators(breakdown)
    if totals is None:
        return ""
    word = f"{totals.operators:,.0f} operators a step"
    most = next((cost for cost in totals.host_lines if cost.line), None)  # backward has none
    if most is not None and most.seconds > MOST_OF / 2 * sum(cost.seconds for cost in totals.host_lines):
        word += f", {most.calls:,.0f} of them at {place(most)}"
    return word + ": fewer, larger ones" + ("" if Plan.parse(breakdown.plan).compile else ", or compile")


def _copies(breakdown: TimeBreakdown, point: Measurement) -> str:
    totals = _operators(breakdown)
    most = totals.copy_lines[0] if totals and totals.copy_lines else None
    where = f" at {place(most)}" if most is not None and most.line else ""
    return f"a layout is copied each step{where}: make it once, in data()"


def _unexplained(breakdown: TimeBreakdown, point: Measurement) -> str:
    if Plan.parse(breakdown.plan).compile:
        return "kernels that compile fused are in here: --profile shows them"
    return "measure again, while nothing else runs here"


RULES = {
    "watching": PartRule(word=lambda *_: "fewer loggers and watchers, or cheaper ones", at_most=True),
    "waiting for data": PartRule(word=_data),
    "transfers": PartRule(
        word=lambda *_: "send smaller types (bytes, not floats), and convert on the device"
    ),
    "imbalance": PartRule(word=_imbalance),
    "pipeline bubble": PartRule(
        word=lambda breakdown, point: f"microbatches={2 * Plan.parse(breakdown.plan).microbatches}", saves=0.5
    ),
    "copies for messages": PartRule(
        word=lambda *_: "a larger batch_size makes them rarer; one process needs none", saves=0.0
    ),
    "exposed communication": PartRule(word=_communication, at_most=True),
    "update": PartRule(word=_update, saves=0.0),
    "values read by the host": PartRule(word=_reads),
    "host between kernels": PartRule(word=_host, at_most=True),
    "copies of layouts": PartRule(word=_copies),
    "memory-bound operators": PartRule(
        word=lambda breakdown, point: (
            "" if Plan.parse(breakdown.plan).compile else "compile fuses some of them"
        ),
        at_most=True,
    ),
    "small matrices": PartRule(word=lambda *_: "a larger batch_size, or wider layers", saves=0.0),
    UNUSED: PartRule(word=lambda breakdown, point: f"precision={breakdown.precision}", at_most=True),
    "not explained": PartRule(word=_unexplained, saves=0.0),
}


def _operators(breakdown: TimeBreakdown) -> OperatorTotals | None:
    return breakdown.trace.processes[0].operators


def place(cost: LineCost) -> str:
    """Formats a line of the user's: `my_task.py:41`."""
    file, _, number = cost.line.rpartition(":")
    return f"{Path(file).name}:{number}"
