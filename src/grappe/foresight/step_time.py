"""Step time: composes a plan's step from the times of operators, messages and the engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from grappe.errors import PlanError
from grappe.foresight.calibration import Calibration, Overhead, write
from grappe.foresight.exchange import SMALL, Exchange, kind_of, pipeline_kind
from grappe.foresight.microbatch import Part, microbatch_parts, part_of
from grappe.foresight.partition import (
    cut_of,
    largest_rows,
    precision_of,
    split_modules,
    stage_parameters,
    threads_of,
    updated_parts,
)
from grappe.foresight.pipeline_passes import PipelinePasses
from grappe.foresight.recording import Recording
from grappe.foresight.replay import replayed
from grappe.foresight.sketch import Sketch
from grappe.foresight.update import update_recording
from grappe.launch.world import cores
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan
from grappe.profiling import limits
from grappe.step.clip import needs_norm
from grappe.words import format_bytes

UNTIMED = ("exact", "compile", "batchnorm")
"""Keys of plans whose time is foreseen on no device."""
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


def refuse_untimed(plan: Plan) -> None:
    """Raises PlanError where the plan's time is foreseen on no device."""
    together = {
        "pipeline with shard": plan.pipeline > 1 and plan.shard > 1,
        "pipeline with offload": plan.pipeline > 1 and plan.offload != "none",
        "tensor with another axis": 1 < plan.tensor < plan.processes,
        "tensor with offload": plan.tensor > 1 and plan.offload != "none",
    }
    keys = [key for key in UNTIMED if key in plan.changed_keys()]
    why = next(iter([*keys, *(name for name, given in together.items() if given)]), None)
    if why is not None:
        raise untimed(why)


def untimed(why: str) -> PlanError:
    """Makes the error of a plan whose time is not foreseen."""
    return PlanError(f"{why}: its time is not foreseen; grappe measure runs any plan")


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
        samples = batch or sketch.task.batch_size
        rows = largest_rows(sketch, plan, samples)
        data = sketch.batches.seconds(rows * plan.microbatches)
        if plan.pipeline > 1:
            return self._pipelined(plan, samples, data)
        trace = sketch.trace(rows, precision_of(plan), plan.recompute, threads, plan.tensor)
        assert trace.recording is not None
        ahead, back = microbatch_parts(trace, self._known(plan, trace.recording, *self._updates_of(plan)))
        passed = self._part(ahead, "forward") + self._part(back, "backward")
        units = len(sketch.task.units(sketch.plain)) or 1
        passed += units * self._recomputed(plan)
        compute = plan.microbatches * passed + self._accumulated(plan)
        compute += self.updated(plan) + self._overhead("one").step
        if plan.tensor > 1:
            modules = split_modules(sketch, plan)
            extra, communication = self._exchange.of_split(plan, trace.recording, modules, compute)
        else:
            extra, communication = self._exchange.of(plan, passed, compute)
        return StepTime(
            compute=compute + extra,
            communication=communication,
            data=data,
            spread=SPREAD if plan.processes == 1 else SPREAD_OF_SEVERAL,
        )

    def operators(self, plan: Plan) -> tuple[tuple[float, float], ...]:
        """Returns the number of operators, and their kernels' seconds, of a forward, a backward and an update.

        Under a pipeline the update is the first process's.
        """
        sketch = self._sketch
        rows = largest_rows(sketch, plan, sketch.task.batch_size)
        trace = sketch.trace(rows, precision_of(plan), plan.recompute, threads_of(plan), plan.tensor)
        assert trace.recording is not None
        update = self._updates_of(plan)[0]
        known = self._known(plan, trace.recording, update)
        parts = (*microbatch_parts(trace, known), part_of(update.operators, known))
        return tuple((one.operators, one.kernels) for one in parts)

    def updated(self, plan: Plan) -> float:
        """Returns the seconds of clipping and the optimizer's step, of the process that has most."""
        updates = self._updates_of(plan)
        known = self._known(plan, *updates)
        parts = [part_of(one.operators, known) for one in updates]
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
        for key in (named := updated_parts(sketch, plan)):
            if key not in self._updates:
                self._updates[key] = update_recording(sketch.task, sketch.mode, key)
        return [self._updates[key] for key in named]

    def _norm_summed(self, plan: Plan) -> float:
        """Returns the seconds in which processes that have a part of the gradient each sum the squares of its norm."""
        if not needs_norm(self._sketch.task, plan):
            return 0.0
        axes = [count for count in (plan.shard, plan.tensor, plan.pipeline) if count > 1]
        return sum(self._exchange.seconds("all_reduce", count, SMALL) for count in axes)

    # ---- Pipelines -------------------------------------------------------------------------------------------

    def _pipelined(self, plan: Plan, samples: int, data: float) -> StepTime:
        sketch, own, exchange = self._sketch, self._overhead(pipeline_kind(plan)), self._exchange
        passes, cut = PipelinePasses(sketch, plan, samples), cut_of(sketch, plan)
        known = self._known(plan, *passes.recordings, *self._updates_of(plan))
        took = {}
        for (kind, stage), part in passes.parts(known).items():
            computing = self._part(part, "forward" if kind == "forward" else "backward")
            if kind == "backward":  # no schedule that splits it runs units again
                computing += len(cut[stage]) * self._recomputed(plan)
            took[kind, stage] = computing + own.unit_beside(computing)
        simulated = passes.simulated(took, lambda size: exchange.seconds("send", 2, size))
        busy, sums = max(simulated.busy), 0.0
        if plan.replicate > 1:
            largest = max(sum(one.size for one in several) for several in stage_parameters(sketch, plan))
            sums = exchange.seconds("all_reduce", plan.replicate, largest)
        return StepTime(
            compute=busy + self.updated(plan) + self._overhead("one").step + own.step,
            bubble=simulated.bubble,
            communication=sums + exchange.waited(plan, busy),
            data=data,
            spread=SPREAD_OF_SEVERAL,
        )

    # ---- What was measured -----------------------------------------------------------------------------------

    def _refuse(self, plan: Plan) -> None:
        refuse_untimed(plan)
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
        needed, free = plan.processes * sum(one.peak for one in recordings), limits.free()
        if free is not None and needed > free * MEMORY:
            raise PlanError(
                f"its operators were not run: they take {format_bytes(needed)}, and {format_bytes(free)} are free here"
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
            one.key: 0.0 if one.view or one.collective else one.moved / floor
            for recording in recordings
            for one in recording.operators
            if one.key not in known and one.key not in found
        }
        self.calibration = self.calibration.with_operators(setting, {**cannot_run, **found})
        self.learned = True


def _holds_gradients(plan: Plan) -> bool:
    """Returns whether gradients stay as backward has made them: they are neither reduced nor added to others."""
    return plan.replicate == plan.microbatches == 1 and not uses_shard(plan)
