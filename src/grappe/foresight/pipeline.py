"""Pipeline: composes the peaks of a pipeline's processes from the passes that each of them runs."""

from __future__ import annotations

import dataclasses

from grappe.foresight.memory import UNKNOWN, Part, Peaks, states
from grappe.foresight.parts import (
    cut_of,
    evaluated_rows,
    kept,
    largest_rows,
    processes,
    random_states,
    stage_buffers,
    threads_of,
)  # fmt: skip
from grappe.foresight.sketch import Sketch
from grappe.foresight.trace import Trace
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan


def peaks(sketch: Sketch, plan: Plan, samples: int) -> Peaks:
    """Computes the peaks of the process that needs most; of plans that neither shard nor split, without offload."""
    if uses_shard(plan) or plan.tensor > 1:
        return UNKNOWN
    cut, alike = cut_of(sketch, plan), dataclasses.replace(plan, replicate=1, threads=None)
    rows, threads = largest_rows(sketch, plan, samples), threads_of(plan)
    steps = sketch.passes(alike, cut, rows, threads)
    scored = sketch.evaluated_stages(alike, cut, evaluated_rows(sketch, plan, samples), threads)
    if not all(one.complete for one in (*steps, *scored)):
        return UNKNOWN
    parts, buffers = list(processes(sketch, plan)), stage_buffers(sketch, plan)
    stays = [
        kept(sketch, plan, own, [one.parameter for one in own], size)
        for own, size in zip(parts, buffers, strict=True)
    ]
    places = range(plan.pipeline)
    # The batch before is kept until its loss is read, one step late.
    batches = plan.microbatches * steps[0].batch
    return Peaks(
        step=max(stays[place] + _step(sketch, plan, steps[place], parts[place]) for place in places)
        + random_states(sketch, plan)
        + 2 * batches,
        evaluation=max(
            stays[place]
            + _received(steps[place], parts[place])
            + _scored(sketch, plan, scored, place, samples)
            for place in places
        )
        + batches,
    )


def _step(sketch: Sketch, plan: Plan, trace: Trace, parts: list[Part]) -> int:
    """Computes the most bytes of a process's passes, of the sum over replicas, and of the optimizer's step."""
    after, most = trace.marks[-1].level, max(mark.peak for mark in trace.marks)
    gradients = states(parts, 0).gradients
    summed = gradients if plan.replicate > 1 else 0  # flat copies, all at once
    temporary = int(sketch.together * max((part.temporary for part in parts), default=0))
    return max(most, after + max(summed, temporary))


def _received(trace: Trace, parts: list[Part]) -> int:
    """Computes the bytes into which a process receives, which stay from step to step."""
    return trace.marks[-1].level - states(parts, 0).gradients


def _scored(sketch: Sketch, plan: Plan, traces: tuple[Trace, ...], place: int, samples: int) -> int:
    """Computes the most bytes of an evaluation on a process: of its stages, and of what it has sent."""
    number = -(-sketch.validation_samples // (evaluated_rows(sketch, plan, samples) * plan.data_parallel))
    mine = [traces[stage] for stage in range(place, plan.pipeline * stages_each(plan), plan.pipeline)]
    sends = [one for one in mine if one is not traces[-1]]
    # What was sent is let go when as much more has been sent.
    waiting = min(number - 1, 2 * plan.pipeline) * max((one.boundaries[0] for one in sends), default=0)
    most = max(mark.peak for one in mine for mark in one.marks)
    return most + waiting + min(number, plan.pipeline) * traces[0].batch
