"""Composes the peaks of plans in which each process runs all units: replicated, sharded, offloaded, split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from grappe.foresight.memory import Accumulating, Overlay, Part, Peaks, peak, states
from grappe.foresight.parameters import Parameter
from grappe.foresight.partition import (
    RANDOM_STATE,
    evaluated_rows,
    first_parameters,
    kept,
    largest_rows,
    precision_of,
    processes,
    random_states,
    threads_of,
)  # fmt: skip
from grappe.foresight.sharding import Copies, Sharding
from grappe.foresight.sketch import Sketch
from grappe.foresight.slices import slices_of
from grappe.foresight.trace import Trace
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan
from grappe.step.scores import bytes_kept


def peaks(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> Peaks:
    """Computes the peaks of the process that needs most, at `samples` samples a step."""
    return Peaks(
        step=_step(sketch, plan, samples, copies), evaluation=_evaluation(sketch, plan, samples, copies)
    )


def traces(sketch: Sketch, plan: Plan, samples: int) -> list[tuple[tuple[Trace, ...], Trace]]:
    """Returns the traces of an evaluation and of a step, of each process that differs from others: of one."""
    return [((_evaluated(sketch, plan, samples),), _trained(sketch, plan, samples))]


def _step(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> int | None:
    """Computes the most bytes in a step, of a process with the longest rows; None: not known."""
    trace = _trained(sketch, plan, samples)
    if not trace.complete:
        return None
    parts, own = _first_parts(sketch, plan), first_parameters(sketch, plan)
    marks, ahead = trace.marks[trace.ahead :], trace.marks[: trace.ahead]
    passes = [peak(marks, _overlay(own, plan, place, copies)) for place in _distinct(plan.microbatches)]
    passes.append(peak(ahead, _forward_only(own, plan, copies)) + RANDOM_STATE if ahead else 0)
    temporary = sketch.together * max((part.temporary for part in parts), default=0)
    update = int(states(parts, 0).gradients + temporary)
    # The batch before is kept until its loss is read, one step late.
    return (
        kept(sketch, plan, parts, own)
        + max(*passes, update)
        + random_states(sketch, plan)
        + 2 * plan.microbatches * trace.batch
    )


def _evaluation(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> int | None:
    """Computes the most bytes in an evaluation between two steps; None: not known."""
    rows, trace = evaluated_rows(sketch, plan, samples), _evaluated(sketch, plan, samples)
    if not trace.complete:
        return None
    parts, own = _first_parts(sketch, plan), first_parameters(sketch, plan)
    # With zero=1 and 2, the second batch finds gathered what the first one has left.
    number = -(-sketch.validation_samples // (rows * plan.data_parallel))
    most = peak(trace.marks * min(2, number), _forward_only(own, plan, copies))
    # The step before has its batch until its loss is read.
    batches = plan.microbatches * _trained(sketch, plan, samples).batch + trace.batch
    return kept(sketch, plan, parts, own) + most + batches + bytes_kept(number, trace.numbers)


def _trained(sketch: Sketch, plan: Plan, samples: int) -> Trace:
    """Returns the trace of a process's largest microbatch."""
    return sketch.trace(
        largest_rows(sketch, plan, samples),
        precision_of(plan),
        plan.recompute,
        threads_of(plan),
        plan.tensor,
        slices_of(sketch.task, plan, samples, sketch.samples),
    )


def _evaluated(sketch: Sketch, plan: Plan, samples: int) -> Trace:
    """Returns the trace of an evaluation's largest batch on one process."""
    # A loss of the whole batch takes an evaluation's batch whole, too.
    slices = slices_of(
        sketch.task,
        dataclasses.replace(plan, microbatches=1, batchnorm="local"),
        samples,
        sketch.validation_samples,
    )
    rows = evaluated_rows(sketch, plan, samples)
    return sketch.evaluation(rows, precision_of(plan), threads_of(plan), plan.tensor, slices)


def _first_parts(sketch: Sketch, plan: Plan) -> list[Part]:
    """Returns the parts of the process that has most."""
    return next(iter(processes(sketch, plan)))


def _distinct(microbatches: int) -> Sequence[tuple[bool, bool]]:
    """Returns the microbatches of a step that differ: is it the first, is it the last?"""
    first = [(True, microbatches == 1)]
    return first + [(False, False)] * (microbatches > 2) + [(False, True)] * (microbatches > 1)


def _forward_only(own: Sequence[Parameter], plan: Plan, copies: Copies) -> Overlay:
    """Returns what the plan takes in a forward without a backward: between two steps no gradient is there."""
    if uses_shard(plan):
        return Sharding(own, plan.shard, plan.zero, there=False, reduces=False, copies=copies)
    buckets = sum(one.size for one in own if one.trained) if plan.replicate > 1 else 0
    return Accumulating([], there=False, buckets=buckets)


def _overlay(own: Sequence[Parameter], plan: Plan, place: tuple[bool, bool], copies: Copies) -> Overlay:
    first, last = place
    if uses_shard(plan):
        reduces = last or plan.zero != 1
        return Sharding(own, plan.shard, plan.zero, there=not first, reduces=reduces, copies=copies)
    sizes = [one.size if one.trained else 0 for one in own]
    buckets = sum(sizes) if plan.replicate > 1 else 0
    return Accumulating(sizes, there=not first, buckets=buckets, last=last)
