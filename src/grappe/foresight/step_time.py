"""Step time: composes a plan's step from the times of operators, messages and the engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grappe.errors import PlanError
from grappe.foresight.calibration import Calibration, Overhead, write
from grappe.foresight.exchange import SMALL, Exchange, kind_of
from grappe.foresight.microbatch import MicrobatchTime, Part, microbatch_time, recording_seconds
from grappe.foresight.parameters import Parameter
from grappe.foresight.partition import largest_rows, precision_of, stage_parameters, threads_of
from grappe.foresight.passes import Kind
from grappe.foresight.pipeline_time import orders_of, simulate
from grappe.foresight.recording import Recording
from grappe.foresight.replay import replayed
from grappe.foresight.sharding import rows_of
from grappe.foresight.sketch import Sketch
from grappe.foresight.update import update_recording
from grappe.launch.world import cores
from grappe.parallel.pipeline.rules import RULES, stages_each
from grappe.plan import Plan
from grappe.profiling import memory, memory_limit
from grappe.step.clip import needs_norm

UNTIMED = ("tensor", "offload", "exact", "compile", "batchnorm")
"""Keys of plans whose time is not foreseen."""
MEMORY = 0.7  # of what is free: kernels take some besides
SPREAD, SPREAD_OF_SEVERAL = 0.25, 0.30
"""Relative uncertainty of a calibrated time of one process, and of several: docs/foresee.md has the measured errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step of the slowest process."""

    compute: float
    """Forward, backward, the optimizer's step, and the engine's own work."""
    communication: float = 0.0
    """Messages that nothing overlaps with."""
    bubble: float = 0.0
    """Waiting for other stages."""
    data: float = 0.0
    """Waiting for samples."""
    spread: float = SPREAD
    """Relative uncertainty."""
    calibrated: bool = True
    """Whether it is from times that were measured on such a device."""
    busy: float | None = None
    """Seconds of a GPU's kernels; None: it is not of a GPU."""

    @property
    def total(self) -> float:
        """Sums all of them."""
        return self.compute + self.communication + self.bubble + self.data


class Clock:
    """Times of a sketch's plans on this machine's cores.

    Args:
        sketch: made with `records`.
        calibration: this machine's; operators that it does not know are run, and added to it.
        seconds: for running operators, over all plans.
    """

    def __init__(self, sketch: Sketch, calibration: Calibration, seconds: float = 30.0) -> None:
        self._sketch, self.calibration, self._left = sketch, calibration, seconds
        self._updates: dict[tuple, Recording] = {}
        self.learned = False
        """Whether the calibration has more operators than before."""

    def of(self, plan: Plan, batch: int | None = None) -> StepTime:
        """Foresees a step of `plan`.

        Raises:
            PlanError: the plan's time is not foreseen, or not on this machine.
            TaskError: the task cannot be traced.
        """
        self._refuse(plan)
        sketch, threads = self._sketch, threads_of(plan)
        rows = largest_rows(sketch, plan, batch or sketch.task.batch_size)
        trace = sketch.trace(rows, precision_of(plan), plan.recompute, threads)
        assert trace.recording is not None
        micro = microbatch_time(trace, self._known(plan, trace.recording, *self._updates_of(plan)))
        data = sketch.batches.seconds(rows * plan.microbatches)
        if plan.pipeline > 1:
            return self._pipelined(plan, micro, trace.boundaries, data)
        passed = self._pass(micro, plan)
        units = len(sketch.task.units(sketch.plain)) or 1
        passed += units * self._recomputed(plan)
        compute = plan.microbatches * passed + self._accumulated(plan)
        compute += self.updated(plan) + self._overhead("one").step
        extra, communication = self._exchange.of(plan, passed, compute)
        return StepTime(
            compute=compute + extra,
            communication=communication,
            data=data,
            spread=SPREAD if plan.processes == 1 else SPREAD_OF_SEVERAL,
        )

    def operators(self, plan: Plan) -> tuple[tuple[int, float], ...]:
        """Returns the number of operators, and their kernels' seconds, of a forward, a backward and an update.

        Under a pipeline the update is the first process's.
        """
        sketch = self._sketch
        rows = largest_rows(sketch, plan, sketch.task.batch_size)
        trace = sketch.trace(rows, precision_of(plan), plan.recompute, threads_of(plan))
        assert trace.recording is not None
        update = self._updates_of(plan)[0]
        known = self._known(plan, trace.recording, update)
        ahead, back = microbatch_time(trace, known).whole
        parts = (ahead, back, recording_seconds(update, known))
        return tuple((one.operators, one.kernels) for one in parts)

    def updated(self, plan: Plan) -> float:
        """Returns the seconds of clipping and the optimizer's step, of the process that has most."""
        updates = self._updates_of(plan)
        known = self._known(plan, *updates)
        parts = [recording_seconds(one, known) for one in updates]
        each = self._overhead(kind_of(plan)).update
        return max(part.kernels + part.operators * each for part in parts) + self._norm_summed(plan)

    def keep(self) -> None:
        """Writes the calibration for the next command, if it has learned of operators.

        Raises:
            OSError: there is no room, or no right.
        """
        if self.learned:
            write(self.calibration)

    # ---- Computing -------------------------------------------------------------------------------------------

    def _pass(self, micro: MicrobatchTime, plan: Plan) -> float:
        """Computes the seconds of a forward and backward."""
        ahead, back = micro.whole
        return self._part(ahead, "forward") + self._part(back, "backward")

    def _part(self, part: Part, direction: str) -> float:
        return part.kernels + part.operators * getattr(self._overhead("one"), direction)

    def _recomputed(self, plan: Plan) -> float:
        """Returns the seconds in which the engine gets a unit ready to run again in backward."""
        return self._overhead("recompute").unit if plan.recompute else 0.0

    def _accumulated(self, plan: Plan) -> float:
        """Computes the seconds in which later microbatches add to the gradients of the first."""
        if plan.microbatches == 1:
            return 0.0
        trained = [one for one in self._sketch.parameters if one.trained]
        moved = 3 * sum(one.size for one in trained) / self._exchange.bandwidth(plan)
        return (plan.microbatches - 1) * (moved + len(trained) * self._overhead("one").backward)

    def _updates_of(self, plan: Plan) -> list[Recording]:
        """Records clipping and the optimizer's step, for each process of a pipeline."""
        sketch = self._sketch
        owned = [sketch.parameters] if plan.pipeline == 1 else stage_parameters(sketch, plan)
        found = []
        for own in owned:
            key = tuple((one.name, self._shape(one, plan), _kind(one)) for one in own if one.trained)
            if key not in self._updates:
                self._updates[key] = update_recording(sketch.task, sketch.mode, key)
            found.append(self._updates[key])
        return found

    def _norm_summed(self, plan: Plan) -> float:
        """Returns the seconds in which processes that have a part of the gradient each sum the squares of its norm."""
        if not needs_norm(self._sketch.task, plan):
            return 0.0
        axes = [count for count in (plan.shard, plan.pipeline) if count > 1]
        return sum(self._exchange.seconds("all_reduce", count, SMALL) for count in axes)

    def _shape(self, one: Parameter, plan: Plan) -> tuple[int, ...]:
        if plan.shard == 1 or not one.shape:
            return one.shape
        return (rows_of(one, plan.shard, 0), *one.shape[1:])

    # ---- Pipelines -------------------------------------------------------------------------------------------

    def _pipelined(
        self, plan: Plan, micro: MicrobatchTime, boundaries: tuple[int, ...], data: float
    ) -> StepTime:
        each, sketch = stages_each(plan), self._sketch
        if plan.shard > 1:
            raise PlanError("pipeline with shard: its time is not foreseen; grappe measure runs any plan")
        if RULES[plan.schedule].splits_backward:
            raise PlanError(
                f"schedule={plan.schedule}: its time is not foreseen; grappe measure runs any plan"
            )
        stages = _units_of_stages(sketch, plan, each)
        own, exchange = self._overhead("pipeline" if each == 1 else "interleaved"), self._exchange
        root = [
            self._part(one.get(-1, Part()), way)
            for one, way in ((micro.forward, "forward"), (micro.backward, "backward"))
        ]

        def seconds(kind: Kind, stage: int) -> float:
            ahead = kind == "forward"
            parts, way = (micro.forward, "forward") if ahead else (micro.backward, "backward")
            took = sum(self._part(parts.get(unit, Part()), way) for unit in stages[stage])
            took += 0.0 if ahead else len(stages[stage]) * self._recomputed(plan)
            took += root[not ahead] if stage == len(stages) - 1 else 0.0  # the loss
            return took + own.unit_beside(took)

        def transfer(stage: int) -> float:
            size = boundaries[max(stages[stage])] if stages[stage] else 0
            return exchange.seconds("send", 2, size)

        simulated = simulate(orders_of(plan), seconds, transfer)
        busy = max(simulated.busy)
        accumulated = self._accumulated(plan) / plan.pipeline
        sums = 0.0
        if plan.replicate > 1:
            largest = max(sum(one.size for one in several) for several in stage_parameters(sketch, plan))
            sums = exchange.seconds("all_reduce", plan.replicate, largest)
        return StepTime(
            compute=busy + self.updated(plan) + accumulated + self._overhead("one").step + own.step,
            bubble=simulated.bubble,
            communication=sums + exchange.waited(plan, busy),
            data=data,
            spread=SPREAD_OF_SEVERAL,
        )

    # ---- What was measured -----------------------------------------------------------------------------------

    def _refuse(self, plan: Plan) -> None:
        for key in UNTIMED:
            if key in plan.changed_keys():
                raise PlanError(f"{key}: its time is not foreseen; grappe measure runs any plan")
        if plan.engine != "native":
            raise PlanError(f"engine={plan.engine}: only plans of engine=native are foreseen")
        if plan.processes * threads_of(plan) > cores():
            raise PlanError(
                f"{plan.processes * threads_of(plan)} threads of {plan.processes} processes on {cores()} cores: their "
                "time is not foreseen"
            )

    @property
    def _exchange(self) -> Exchange:
        return Exchange(self.calibration, self._sketch.parameters)

    def _overhead(self, kind: str) -> Overhead:
        return self.calibration.overheads.get(kind, Overhead())

    def _known(self, plan: Plan, *recordings: Recording) -> Any:
        """Returns the seconds of the operators of a step's recordings; if some are not known yet, they are run."""
        # A plan that saves memory gives freed blocks back, and takes their pages anew.
        setting = f"{threads_of(plan)}x{plan.processes}" + "-saving" * plan.saves_memory
        setting += "-holding" * _holds_gradients(plan)
        known = self.calibration.operators.get(setting, {})
        if any(set(one.counts) - set(known) for one in recordings):
            self._run(recordings, plan, setting, known)
            known = self.calibration.operators[setting]
        return lambda one: known[one.key]

    def _run(
        self, recordings: Sequence[Recording], plan: Plan, setting: str, known: Mapping[str, float]
    ) -> None:
        if self._left <= 0:
            raise PlanError("its operators were not run for lack of time: ask again, or for fewer plans")
        needed, free = plan.processes * sum(one.peak for one in recordings), memory_limit.free()
        if free is not None and needed > free * MEMORY:
            raise PlanError(
                f"its operators were not run: they take {memory.size(needed)}, and {memory.size(free)} are free here"
            )
        begun = time.monotonic()
        found = replayed(
            recordings,
            threads=threads_of(plan),
            processes=plan.processes,
            seconds=min(3.0, self._left),
            keeps=not plan.saves_memory,
            holds=_holds_gradients(plan),
            known=frozenset(known),
        )
        self._left -= time.monotonic() - begun
        floor = self._exchange.bandwidth(plan)
        cannot_run = {
            one.key: 0.0 if one.view else one.moved / floor
            for recording in recordings
            for one in recording.operators
            if one.key not in known and one.key not in found
        }
        self.calibration = self.calibration.with_operators(setting, {**cannot_run, **found})
        self.learned = True


def _holds_gradients(plan: Plan) -> bool:
    """Returns whether gradients stay as backward has made them: they are neither reduced nor added to others."""
    return plan.replicate == plan.shard == plan.microbatches == 1


def _kind(one: Parameter) -> torch.dtype:
    return {2: torch.bfloat16, 8: torch.float64}.get(one.item, torch.float32)


def _units_of_stages(sketch: Sketch, plan: Plan, each: int) -> list[list[int]]:
    """Returns the units of each stage, by number."""
    from grappe.parallel.pipeline.cut import cut

    parts = cut(sketch.task, sketch.plain, plan.pipeline * each, sketch.example())
    return [list(units) for units in parts]
