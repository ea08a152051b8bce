"""Verdict: explains measured points in words and tables, and suggests the next measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grappe.data.loading import workers_needed
from grappe.plan import Plan
from grappe.verbs.measure.points import COMPUTING, Measurement, as_json, baseline, efficiency, efficiency_loss
from grappe.words import and_more, filled_table, first_line, plan_name, sent_in_step

if TYPE_CHECKING:
    from rich.table import Table


# Shares of a step, from which on something is worth saying.
WAITING = 0.15
IMBALANCE = 0.10
COMMUNICATING = 0.25
DEARER = 1.25  # a sample's computing time, relative to larger slices
FASTER = 1.05  # less than 5 % may be noise
MOST_WORKERS = 16


def sentences(points: Sequence[Measurement]) -> list[str]:
    """Writes the advice as sentences, the most important first."""
    good = [point for point in points if not point.failure]
    return list(_advice(good)) if good else ["nothing could be measured"]


def title(point: Measurement) -> str:
    """Names a point for messages."""
    return f"{plan_name(point.plan)} (batch {point.batch})"


def _advice(good: Sequence[Measurement]) -> Iterator[str]:
    asked = [point for point in good if point.origin != "advice"]
    yield from _fastest(good)
    for point in asked:
        yield from _data(point)
        crowded = point.device == "cpu" and point.processes * point.threads > point.cores
        if point.processes > 1 and not crowded and point.imbalance / point.cost() >= IMBALANCE / point.processes:
            slow, more, where = point.slowest()
            if more >= IMBALANCE * slow.step:
                yield (
                    f"{title(point)}: process {slow.rank} on {slow.host} delays the others: it has "
                    f"{slow.busy * 1e3:.3g} ms a step to do, {more * 1e3:.3g} ms more than they, most of it in {where}"
                )
        if crowded:
            yield (
                f"{title(point)}: {point.processes} processes with {point.threads} thread"
                f"{'s' if point.threads > 1 else ''} each share {point.cores} cores: use at most {point.cores} in all"
            )
        if point.sent:
            yield f"{title(point)}: in a step, process 0 sends {sent_in_step(point.sent)}"
        if share := Plan.parse(point.plan).checked:
            yield f"{title(point)}: check adds {share:.2%} of the computing, by count"
    for point in asked:
        yield from _small_slices(point, good)
    for point in good:
        share = point.share("communication") - point.imbalance / point.cost()
        if point.processes > 1 and share > COMMUNICATING:
            yield (
                f"{title(point)}: {share:.0%} of the time goes into communication: a larger batch_size, or "
                "fewer processes, make it less"
            )
    yield from _several_processes(good)


def _is_apart(point: Measurement, other: Measurement) -> bool:
    """Returns whether each trial of one point was faster than all of the other, on a machine without other programs."""
    slow, fast = sorted((point, other), key=lambda each: each.rate)
    return max(slow.rates) * FASTER < min(fast.rates) and not point.load


def _fastest(good: Sequence[Measurement]) -> Iterator[str]:
    if busy := good[0].load:
        yield f"other programs take this machine's cores (load {busy:.0f}): no plan is called faster"
    elif len(good) > 1:
        best = max(good, key=lambda point: point.rate)
        if rivals := [title(point) for point in good if point is not best and not _is_apart(best, point)]:
            several = f"{title(best)} and {and_more(rivals, 3)}"
            yield f"{several} are less than 5 % apart, or their ranges overlap: none is called faster"
            return
        gain = best.rate / good[0].rate
        lead = f", {gain:.1f} times {title(good[0])}" if gain > FASTER else ""
        yield f"fastest: {title(best)}, {best.rate:,.0f} samples/s{lead}"
        counted = [point for point in good if point.joules is not None]
        if len(counted) > 1:
            frugal = min(counted, key=lambda point: point.joules or 0.0)
            yield f"least energy: {title(frugal)}, {frugal.joules:.3g} J a sample"
    on_cpu = [point for point in good if point.device == "cpu"]
    on_gpu = [point for point in good if point.device != "cpu"]
    if on_cpu and on_gpu and not busy:
        cpu, gpu = (max(some, key=lambda point: point.rate) for some in (on_cpu, on_gpu))
        if cpu.rate > gpu.rate * FASTER:
            several = f"{cpu.processes} CPU processes are" if cpu.processes > 1 else "one CPU process is"
            yield (
                f"this model is too small for a GPU at this batch size: {several} faster "
                f"({cpu.rate / gpu.rate:.1f} times)"
            )
        else:
            yield f"the GPU is {gpu.rate / cpu.rate:.1f} times as fast as {title(cpu)}"


def advised_workers(point: Measurement) -> int | None:
    """Estimates the data workers that a process needs, from batches' loading time; None: workers would not help."""
    waits = point.share("data", "transfer")
    if waits < WAITING or point.workers is None:
        return None
    needed = workers_needed(waits, point.workers)
    return needed if needed > point.workers else None


def _data(point: Measurement) -> Iterator[str]:
    if (waits := point.share("data", "transfer")) < WAITING:
        return
    who = "the GPU waits" if point.device != "cpu" else "it waits"
    wait = f"{title(point)}: {who} for data {waits:.0%} of the time"
    needed = advised_workers(point)
    if point.origin == "script":
        yield f"{wait}: give its DataLoader workers (num_workers=), or more of them"
    elif point.workers is None:
        yield f"{wait}: the samples are in memory, so make `transform` and `augment` cheaper, or the batch larger"
    elif needed is None or needed > MOST_WORKERS:
        yield f"{wait}: {needed or 'more'} workers would be needed, so store the samples decoded and smaller first"
    else:
        room = point.cores // max(1, point.processes)
        short = f" (it has {room} cores a process: fewer may do if loading only waits)"
        yield f"{wait}: use workers={needed}{short if needed > room else ''}"


def _small_slices(point: Measurement, good: Sequence[Measurement]) -> Iterator[str]:
    """Says whether slices are so small that a sample costs more than in larger slices."""
    size = point.batch / point.slices
    larger = [
        other
        for other in good
        if other.batch / other.slices > size and (other.device, other.threads) == (point.device, point.threads)
    ]
    if not larger:
        return
    # The least of all trials: other programs on the machine make trials longer, never shorter.
    other = min(larger, key=lambda point: point.least(*COMPUTING))
    factor = point.least(*COMPUTING) / other.least(*COMPUTING)
    if factor > DEARER:
        yield (
            f"{title(point)}: slices of {size:.0f} samples are small: a sample takes {factor:.1f} times the "
            f"computing that it takes in slices of {other.batch / other.slices:.0f}: use a larger batch_size"
        )


def _several_processes(good: Sequence[Measurement]) -> Iterator[str]:
    """Says what the most processes gain over the fewest, of the points of the first point's kind."""
    first = good[0]
    family = {  # of plans with as many processes, the fastest
        point.processes: point
        for point in sorted(good, key=lambda point: point.rate)
        if point.batch == first.batch
        and point.device == first.device
        and point.origin != "advice"
        and _alike(point) == _alike(first)
    }
    if len(family) < 2:
        return
    alone, many = min(family), max(family)
    last = family[many]
    if not _is_apart(last, family[alone]):
        return
    speed = last.rate / family[alone].rate
    if speed <= 1:
        yield f"more processes than {alone} do not help at this batch size"
        return
    gone = efficiency_loss(last, family[alone])
    parts = {
        "waiting for data": gone["data"],
        "communication": gone["communication"],
        "imbalance": gone["imbalance"],
        "smaller slices or shared cores": gone["computing"],
    }
    worst = max(parts, key=lambda part: parts[part])
    share = efficiency(last, family[alone])
    where = f"; most is lost to {worst}, {parts[worst]:.0%}" if parts[worst] > 0.05 and speed < many / alone else ""
    yield f"{many} processes are {speed:.1f} times as fast as {alone} (efficiency {share:.0%}{where})"


def _alike(point: Measurement) -> Plan:
    """Returns the plan without its degrees: only points that agree in the rest show the effect of more processes."""
    degrees = ("replicate", "shard", "zero", "pipeline", "schedule", "stages", "domain", "cut", "tensor")
    return dataclasses.replace(Plan.parse(point.plan), **{name: getattr(Plan(), name) for name in degrees})


def larger_batch(points: Sequence[Measurement]) -> list[tuple[Plan, int]]:
    """Returns the first plan with four times its batch, unless several batch sizes were measured."""
    good = [point for point in points if not point.failure]
    return [(Plan.parse(good[0].plan), 4 * good[0].batch)] if len({point.batch for point in good}) == 1 else []


COLUMNS = (
    "plan", "batch", "samples/s", "speed-up", "efficiency", "data", "communication", "imbalance",
    "memory, MB", "of reachable FLOP/s", "J a sample",
)  # fmt: skip
LEAST = 0.005  # of the time; what takes less is in one row together, or not shown


def table(points: Sequence[Measurement]) -> Table:
    """Makes the table of the points' figures; columns without a figure are left out."""
    first = next(point for point in points if not point.failure)
    return filled_table(COLUMNS, [_row(point, points, first) for point in points])


def _row(point: Measurement, points: Sequence[Measurement], first: Measurement) -> list[str]:
    title = plan_name(point.plan) + ("  (tried)" if point.origin == "advice" else "")
    if point.failure:
        cells = [title, str(point.batch or ""), f"failed: {first_line(point.failure)}"]
        return [*cells, *[""] * (len(COLUMNS) - len(cells))]
    base = baseline(point, points)
    return [
        title,
        f"{point.batch}",
        f"{point.rate:,.0f} ({min(point.rates):,.0f} to {max(point.rates):,.0f})",
        f"{point.rate / first.rate:.2f}" if len(points) > 1 else "",
        "" if base is None else f"{efficiency(point, base):.0%}",
        _share(point.share("data", "transfer")),
        _share(point.share("communication")),
        _share(point.imbalance / point.cost()),
        f"{point.memory / 1e6:,.0f}",
        "" if point.computed is None else f"{point.computed:.1%}",
        "" if point.joules is None else f"{point.joules:.3g}",
    ]


def _share(part: float) -> str:
    return f"{part:.0%}" if abs(part) >= LEAST else ""


def notes(points: Sequence[Measurement]) -> Iterator[str]:
    """Lists values that could not be measured, once for each reason; that a CPU counts no energy helps nobody."""
    reasons = {(what, reason) for point in points for what, reason in point.unmeasured.items() if what != "processors"}
    for what, reason in sorted(reasons):
        label = {"gpu": "energy of the GPU", "flops": "operations"}
        yield f"{label.get(what, what)}: not measurable here: {reason}"


def content(
    points: Sequence[Measurement], task: str, *, weak: bool = False, why: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Returns all figures as JSON's values, for --json, and for `grappe report`."""
    return {
        "kind": "measurement",
        "task": task,
        "weak": weak,
        "points": [as_json(point, points) for point in points],
        "why": list(why),
        "verdict": sentences(points),
    }
