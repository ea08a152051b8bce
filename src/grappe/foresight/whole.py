"""Whole: composes the peaks of plans in which each process runs all units: replicated, sharded, offloaded, split."""

from __future__ import annotations

from collections.abc import Sequence

from grappe.foresight.memory import Accumulating, Overlay, Part, Peaks, peak, states
from grappe.foresight.parts import (
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
from grappe.foresight.sketch import Parameter, Sketch
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan


def peaks(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> Peaks:
    """Computes the peaks of the process that needs most, at `samples` samples a step."""
    return Peaks(
        step=_step(sketch, plan, samples, copies), evaluation=_evaluation(sketch, plan, samples, copies)
    )


def _step(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> int | None:
    """Computes the most bytes in a step, of a process with the longest rows; None: not known."""
    rows = largest_rows(sketch, plan, samples)
    trace = sketch.trace(rows, precision_of(plan), plan.recompute, threads_of(plan), plan.tensor)
    if not trace.complete:
        return None
    parts, own = _first_parts(sketch, plan), first_parameters(sketch, plan)
    passes = [peak(trace, _overlay(own, plan, place, copies)) for place in _distinct(plan.microbatches)]
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
    rows = evaluated_rows(sketch, plan, samples)
    trace = sketch.evaluation(rows, precision_of(plan), threads_of(plan), plan.tensor)
    if not trace.complete:
        return None
    parts, own = _first_parts(sketch, plan), first_parameters(sketch, plan)
    overlay: Overlay = Accumulating([], there=False)
    buckets = 0
    if uses_shard(plan):
        overlay = Sharding(own, plan.shard, plan.zero, there=False, reduces=False, copies=copies)
    elif plan.replicate > 1:
        buckets = states(parts, 0).gradients
    trained = sketch.trace(
        largest_rows(sketch, plan, samples), precision_of(plan), plan.recompute, threads_of(plan), plan.tensor
    )
    # The step before has its batch until its loss is read.
    batches = plan.microbatches * trained.batch + trace.batch
    return kept(sketch, plan, parts, own) + buckets + peak(trace, overlay) + batches


def _first_parts(sketch: Sketch, plan: Plan) -> list[Part]:
    """Returns the parts of the process that has most."""
    return next(iter(processes(sketch, plan)))


def _distinct(microbatches: int) -> Sequence[tuple[bool, bool]]:
    """Returns the microbatches of a step that differ: is it the first, is it the last?"""
    first = [(True, microbatches == 1)]
    return first + [(False, False)] * (microbatches > 2) + [(False, True)] * (microbatches > 1)


def _overlay(own: Sequence[Parameter], plan: Plan, place: tuple[bool, bool], copies: Copies) -> Overlay:
    first, last = place
    if uses_shard(plan):
        reduces = last or plan.zero != 1
        return Sharding(own, plan.shard, plan.zero, there=not first, reduces=reduces, copies=copies)
    sizes = [one.size if one.trained else 0 for one in own]
    buckets = sum(sizes) if plan.replicate > 1 else 0
    return Accumulating(sizes, there=not first, buckets=buckets, last=last)
