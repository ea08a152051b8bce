"""Pipeline peaks: composes the peaks of a pipeline's processes from the passes that each of them runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from grappe.foresight.ledger import Mark
from grappe.foresight.memory import UNKNOWN, Accumulating, Overlay, Peaks, peak, states
from grappe.foresight.parameters import Parameter
from grappe.foresight.partition import (
    RANDOM_STATE,
    cut_of,
    evaluated_rows,
    kept,
    processes,
    stage_buffers,
    threads_of,
    traced_passes,
    traced_plan,
)  # fmt: skip
from grappe.foresight.schedules import order_of
from grappe.foresight.sharding import Copies, Sharding
from grappe.foresight.sketch import Sketch
from grappe.foresight.trace import REDUCE, START, Trace
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.pipeline.units import pipeline_units
from grappe.parallel.shard import uses_shard
from grappe.parallel.ties import untied
from grappe.plan import Plan
from grappe.step.scores import bytes_kept


def peaks(sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> Peaks:
    """Computes the peaks of the process that needs most; of plans that do not split layers, without offload."""
    if plan.tensor > 1 or plan.offload != "none" or sketch.task.whole_batch_loss:
        return UNKNOWN
    if uses_shard(plan) and _has_ties(sketch):  # stages whose root gathers parameters, too
        return UNKNOWN
    made = _Pipeline(sketch, plan, samples, copies)
    if not made.complete:
        return UNKNOWN
    places = range(plan.pipeline)
    return Peaks(
        step=max(made.step(place) for place in places),
        evaluation=max(made.evaluation(place) for place in places),
    )


def _has_ties(sketch: Sketch) -> bool:
    units = pipeline_units(sketch.task, sketch.plain)
    return len(untied(sketch.plain, units)) < len(units)


def traces(sketch: Sketch, plan: Plan, samples: int) -> list[tuple[tuple[Trace, ...], Trace]]:
    """Returns the traces of an evaluation, by stage, and of a step, of each of a pipeline's processes."""
    steps, scored = traced_passes(sketch, plan, samples), _scored(sketch, plan, samples)
    return [
        (tuple(scored[stage] for stage in _stages(plan, place)), step) for place, step in enumerate(steps)
    ]


def _scored(sketch: Sketch, plan: Plan, samples: int) -> tuple[Trace, ...]:
    rows = evaluated_rows(sketch, plan, samples)
    return sketch.evaluated_stages(traced_plan(plan), cut_of(sketch, plan), rows, threads_of(plan))


def _stages(plan: Plan, place: int) -> range:
    return range(place, plan.pipeline * stages_each(plan), plan.pipeline)


class _Pipeline:
    """A pipeline's processes, by their place in it."""

    def __init__(self, sketch: Sketch, plan: Plan, samples: int, copies: Copies) -> None:
        self._sketch, self._plan, self._copies = sketch, plan, copies
        self._cut = cut_of(sketch, plan)
        self._rows = evaluated_rows(sketch, plan, samples)
        self._steps = traced_passes(sketch, plan, samples)
        self._scored = _scored(sketch, plan, samples)
        everyone = list(processes(sketch, plan))
        self._parts = everyone[:: len(everyone) // plan.pipeline]  # the first process of each shard axis
        self._buffers = stage_buffers(sketch, plan)

    @property
    def complete(self) -> bool:
        """Returns whether what all kernels take is counted."""
        return all(one.complete for one in (*self._steps, *self._scored))

    def step(self, place: int) -> int:
        """Computes the most bytes of a process's passes, of the sum over replicas, and of the optimizer's step."""
        trace, parts, overlay = self._steps[place], self._parts[place], self._overlay(place)
        most = peak(trace.marks, overlay)
        after = trace.marks[-1].level + overlay.now
        summed = 0
        if self._plan.replicate > 1 and not uses_shard(self._plan):
            summed = states(parts, 0).gradients  # flat copies, all at once
        temporary = int(self._sketch.together * max((part.temporary for part in parts), default=0))
        # The batch before is kept until its loss is read, one step late.
        batches = 2 * self._plan.microbatches * trace.batch
        return (
            self._kept(place)
            + max(most, after + max(summed, temporary))
            + self._random_states(place)
            + batches
        )

    def evaluation(self, place: int) -> int:
        """Computes the most bytes of an evaluation on a process: of its stages, and of what it has sent."""
        plan, scored = self._plan, self._scored
        number = -(-self._sketch.validation_samples // (self._rows * plan.data_parallel))
        mine = [scored[stage] for stage in _stages(plan, place)]
        sends = [one for one in mine if one is not scored[-1]]
        # What was sent is let go when as much more has been sent.
        waiting = min(number - 1, 2 * plan.pipeline) * max((one.boundaries[0] for one in sends), default=0)
        # With zero=1 and 2, the second batch finds gathered what the first one has left.
        marks = [mark for one in mine for mark in one.marks] * min(2, number)
        batches = plan.microbatches * self._steps[0].batch + min(number, plan.pipeline) * scored[0].batch
        most = peak(marks, self._overlay(place)) + sum(bytes_kept(number, one.numbers) for one in mine)
        return self._kept(place) + self._received(place) + most + waiting + batches

    def _random_states(self, place: int) -> int:
        """Computes the bytes of the random states of units whose forward is to run again."""
        now = most = 0
        for kind, stage, _ in order_of(self._plan, place) if self._plan.recompute else ():
            now += len(self._cut[stage]) * (1 if kind == "forward" else -1)
            most = max(most, now)
        return RANDOM_STATE * most

    def _kept(self, place: int) -> int:
        parts = self._parts[place]
        return kept(self._sketch, self._plan, parts, [one.parameter for one in parts], self._buffers[place])

    def _received(self, place: int) -> int:
        """Computes the bytes into which a process receives, which stay from step to step."""
        overlay, parts = self._overlay(place), self._parts[place]
        peak(self._steps[place].marks, overlay)
        return self._steps[place].marks[-1].level + overlay.now - states(parts, 0).gradients

    def _overlay(self, place: int) -> Overlay:
        if not uses_shard(self._plan):
            return Accumulating([], there=False)
        own = [part.parameter for part in self._parts[place]]
        stages = {number: self._cut[number] for number in _stages(self._plan, place)}
        return _ShardedStages(own, stages, self._plan, self._copies)


class _ShardedStages:
    """Stages of a process whose parameters are sharded, each a model of its own to fully_shard."""

    def __init__(
        self, own: Sequence[Parameter], stages: Mapping[int, range], plan: Plan, copies: Copies
    ) -> None:
        held = plan.zero == 1
        self._stages = {
            number: Sharding(
                [one if one.unit in units else dataclasses.replace(one, shape=()) for one in own],
                plan.shard,
                plan.zero,
                there=False,
                reduces=True,
                copies=copies,
                held=held,
            )
            for number, units in stages.items()
        }
        self._stage = next(iter(stages))

    @property
    def now(self) -> int:
        """Sums the bytes in use."""
        return sum(one.now for one in self._stages.values())

    def at(self, mark: Mark) -> int:
        if mark.kind == START:
            self._stage = mark.which
            return self.now
        before = self.now
        if mark.kind == REDUCE:
            return max(self._besides(number, mark) for number in self._stages)
        return max(before, self._besides(self._stage, mark))

    def _besides(self, stage: int, mark: Mark) -> int:
        others = sum(one.now for number, one in self._stages.items() if number != stage)
        return others + self._stages[stage].at(mark)
