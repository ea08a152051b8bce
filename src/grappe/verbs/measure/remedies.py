"""Remedies: for each part of a waterfall, the plan's word or the line of code that moves it, and the gain to expect."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grappe.data.loading import workers_needed
from grappe.plan import Plan
from grappe.profiling.operator_sums import LineCost
from grappe.verbs.measure.points import Point
from grappe.verbs.measure.verdict import MOST_WORKERS, slow_process
from grappe.verbs.measure.waterfall import UNUSED, Waterfall, with_precision

WORTH = 0.02  # share of the time, from which on a part has a remedy
ENOUGH = 0.05  # share of the time that evaluations, or saves, may well take
MOST_OF = 0.5  # of a whole, to be named as its cause
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


def remedies(fall: Waterfall, point: Point, points: Sequence[Point]) -> list[Remedy]:
    """Returns the remedies, that with the largest saving first.

    Args:
        point: the measured point that was split.
        points: all measured points, of which one may have a larger batch, and one another precision.
    """
    known = as_tried(fall, point, points)
    found = [
        remedy
        for part, make in REMEDIES.items()
        if known.share(part) >= WORTH
        for remedy in make(known, point, known.share(part))
    ]
    found += [*_small_batch(fall, point, points), *_precision(fall, point, points)]
    return sorted(found, key=lambda one: -one.saves)


def to_try(fall: Waterfall) -> Plan | None:
    """Returns the plan in the precision that would save matrix products' time; None: there is none worth a trial."""
    if fall.share(UNUSED) < WORTH:
        return None
    return dataclasses.replace(Plan.parse(fall.plan), precision=fall.precision)  # pyrefly: ignore


def as_tried(fall: Waterfall, point: Point, points: Sequence[Point]) -> Waterfall:
    """Returns the waterfall with what another precision saves where one of `points` has tried it: else the same."""
    other = _in_other_precision(fall, point, points)
    if other is None or other.failure:
        return fall
    return with_precision(fall, _saved(fall, point, other) * fall.seconds)


def _evaluation(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    yield from _rarer(fall, "evaluation", fall.every.evaluation, "--evaluate-every")


def _checkpoints(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    yield from _rarer(fall, "checkpoints", fall.every.save, "--save-every")


def _rarer(fall: Waterfall, part: str, every: int, option: str) -> Iterator[Remedy]:
    taken = fall.parts[part]
    rest = fall.seconds - taken
    enough = math.ceil(taken * every / (ENOUGH * rest))
    saved = taken * (1 - every / enough) / fall.seconds
    if saved >= WORTH:
        yield Remedy(part=part, word=f"{option} {enough}", saves=saved)


def _watching(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    yield Remedy(
        part="watching", word="fewer loggers and watchers, or cheaper ones", saves=share, at_most=True
    )


def _data(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    part = "waiting for data"
    if point.workers is None:
        word = "the samples are in memory: a cheaper transform or augment"
    else:
        needed = workers_needed(share, point.workers)
        more = point.workers < needed <= MOST_WORKERS
        word = f"workers={needed}" if more else "store the samples decoded and smaller"
    yield Remedy(part=part, word=word, saves=share)


def _transfers(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    yield Remedy(
        part="transfers",
        word="send smaller types (bytes, not floats), and convert on the device",
        saves=share,
    )


def _imbalance(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    if Plan.parse(fall.plan).pipeline > 1:
        work = [one.phases["forward"] + one.phases["backward"] for one in point.middle().processes]
        most = max(range(len(work)), key=lambda rank: work[rank])
        mean = sum(work) / len(work)
        word = (
            f"the stages of process {most} have {work[most] / mean:.1f} times the mean work: cut elsewhere (cuts), "
            "or into smaller units"
        )
    else:
        slow, more, where = slow_process(point)
        word = (
            f"process {slow.rank} on {slow.host} has {more * 1e3:.3g} ms more a step, most of it in {where}"
        )
    yield Remedy(part="imbalance", word=word, saves=share)


def _bubble(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    micro = Plan.parse(fall.plan).microbatches
    yield Remedy(part="pipeline bubble", word=f"microbatches={2 * micro}", saves=share / 2)


def _communication(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    seen, plan = fall.traces.processes[0], Plan.parse(fall.plan)
    name, size = seen.largest
    if plan.data_parallel == 1 and plan.pipeline > 1:
        word = "cut where less is sent from stage to stage (cuts)"
    elif plan.data_parallel == 1:
        word = "a smaller tensor=: each layer that is split waits for the others' parts"
    elif size > MOST_OF * seen.gradients:
        word = (
            f"the gradient of {name} is {size / seen.gradients:.0%} of all bytes, and is sent in one piece: "
            "split that parameter, so that sending overlaps with backward"
        )
    else:
        word = "a larger batch_size, or fewer processes"
    yield Remedy(part="exposed communication", word=word, saves=share, at_most=True)


def _messages(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    yield Remedy(
        part="copies for messages", word="a larger batch_size makes them rarer; one process needs none"
    )


def _update(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    split = "; shard= with zero=1 splits them" if Plan.parse(fall.plan).replicate > 1 else ""
    yield Remedy(part="update", word=f"a larger batch_size makes updates rarer{split}")


def _reads(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    lines = fall.traces.processes[0].traced
    most = lines.read_lines[0] if lines and lines.read_lines else None
    if most is None:
        return
    times = f"{most.calls:,.0f} time{'s' if most.calls > 1 else ''} a step"
    word = f"{place(most)} reads values (.item(), float(), .tolist()) {times}: keep them tensors"
    yield Remedy(part="values read by the host", word=word, saves=share)


def _host(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    trace = fall.traces.processes[0].traced
    if trace is None:
        return
    word = f"{trace.operators:,.0f} operators a step"
    most = next((line for line in trace.host_lines if line.line), None)  # backward has none
    if most is not None and most.seconds > MOST_OF / 2 * _seconds(trace.host_lines):
        word += f", {most.calls:,.0f} of them at {place(most)}"
    word += ": fewer, larger ones" + ("" if Plan.parse(fall.plan).compile else ", or compile")
    yield Remedy(part="host between kernels", word=word, saves=share, at_most=True)


def _copies(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    trace = fall.traces.processes[0].traced
    most = trace.copy_lines[0] if trace and trace.copy_lines else None
    where = f" at {place(most)}" if most is not None and most.line else ""
    word = f"a layout is copied each step{where}: make it once, in data()"
    yield Remedy(part="copies of layouts", word=word, saves=share)


def _elementwise(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    if not Plan.parse(fall.plan).compile:
        yield Remedy(
            part="memory-bound operators", word="compile fuses some of them", saves=share, at_most=True
        )


def _small(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    yield Remedy(part="small matrices", word="a larger batch_size, or wider layers")


def _unexplained(fall: Waterfall, point: Point, share: float) -> Iterator[Remedy]:
    compiled = Plan.parse(fall.plan).compile
    word = (
        "kernels that compile fused are in here: --profile shows them" if compiled
        else "measure again, while nothing else runs here"
    )  # fmt: skip
    yield Remedy(part="not explained", word=word)


REMEDIES: dict[str, Callable[[Waterfall, Point, float], Iterator[Remedy]]] = {
    "evaluation": _evaluation,
    "checkpoints": _checkpoints,
    "watching": _watching,
    "waiting for data": _data,
    "transfers": _transfers,
    "imbalance": _imbalance,
    "pipeline bubble": _bubble,
    "copies for messages": _messages,
    "exposed communication": _communication,
    "update": _update,
    "values read by the host": _reads,
    "host between kernels": _host,
    "copies of layouts": _copies,
    "memory-bound operators": _elementwise,
    "small matrices": _small,
    "not explained": _unexplained,
}


def _small_batch(fall: Waterfall, point: Point, points: Sequence[Point]) -> Iterator[Remedy]:
    """Compares with a larger batch under the same plan, if one was measured."""
    larger = [one for one in points if not one.failure and one.plan == point.plan and one.batch > point.batch]
    if not larger:
        return
    other = max(larger, key=lambda one: one.rate)
    saved = _saved(fall, point, other)
    if saved >= WORTH:
        yield Remedy(
            part=SMALL_BATCH,
            word=f"batch_size={other.batch} (tried; it changes what is learned)",
            saves=saved,
        )


def _precision(fall: Waterfall, point: Point, points: Sequence[Point]) -> Iterator[Remedy]:
    """Compares with the same plan in the quickest precision: casts may take more than products save."""
    if to_try(fall) is None:
        return
    word = f"precision={fall.precision}"
    other = _in_other_precision(fall, point, points)
    if other is None:
        yield Remedy(part=UNUSED, word=word, saves=fall.share(UNUSED), at_most=True)
    elif other.failure:
        yield Remedy(part=UNUSED, word=f"{word} was tried, and failed: {other.failure.splitlines()[0]}")
    elif (saved := _saved(fall, point, other)) >= WORTH:
        yield Remedy(part=UNUSED, word=f"{word} (tried)", saves=saved)
    else:
        speed = other.rate / point.rate
        yield Remedy(part=UNUSED, word=f"nothing: {word} was tried, and is {speed:.2f} times as fast")


def _in_other_precision(fall: Waterfall, point: Point, points: Sequence[Point]) -> Point | None:
    plan = to_try(fall)
    return next((one for one in points if (one.plan, one.batch) == (str(plan), point.batch)), None)


def _saved(fall: Waterfall, point: Point, other: Point) -> float:
    """Computes the share of the time that is saved at the rate of `other`; evaluations and saves stay as they are."""
    step = sum(seconds for part, seconds in fall.parts.items() if part not in ("evaluation", "checkpoints"))
    return (1 - point.rate / other.rate) * step / fall.seconds


def place(cost: LineCost) -> str:
    """Formats a line of the user's: `my_task.py:41`."""
    file, _, number = cost.line.rpartition(":")
    return f"{Path(file).name}:{number}"


def _seconds(lines: Sequence[LineCost]) -> float:
    return sum(one.seconds for one in lines)
