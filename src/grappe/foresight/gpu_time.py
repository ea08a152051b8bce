"""GPU time: a plan's step on a GPU that is not here, from its data sheet and the operators of a trace."""

from __future__ import annotations

from grappe.foresight.devices import LAUNCH, LEAST, PASS, SPLIT, STEP, kernels
from grappe.foresight.fabric import Fabric
from grappe.foresight.partition import (
    largest_rows,
    precision_of,
    split_modules,
    stage_parameters,
    updated_parts,
)
from grappe.foresight.pipeline_passes import PipelinePasses
from grappe.foresight.recording import Operator, Recording
from grappe.foresight.sketch import Sketch
from grappe.foresight.step_time import StepTime, refuse_untimed, untimed
from grappe.foresight.trace import LOSS, Trace
from grappe.foresight.update import update_recording
from grappe.plan import Plan

SPREAD = 0.5
"""Relative uncertainty of what no such GPU was measured for."""
OVERLAP = 0.5  # of the computing, during which messages travel unnoticed


def gpu_time(sketch: Sketch, plan: Plan, fabric: Fabric, *, batch: int | None = None) -> StepTime:
    """Foresees a step of `plan`, one process on each GPU; kernels by roofline, the host by operators.

    Args:
        sketch: made with `records`.

    Raises:
        PlanError: the plan's time is not foreseen.
        TaskError: the task cannot be traced.
    """
    refuse_untimed(plan)
    if plan.offload != "none":
        raise untimed("offload on a GPU")
    fabric.refuse_unknown(plan)
    device = fabric.device
    device.flops(plan.precision)
    samples = batch or sketch.task.batch_size
    if plan.pipeline > 1:
        return _pipelined(sketch, plan, samples, fabric)
    rows = largest_rows(sketch, plan, samples)
    trace = sketch.trace(rows, precision_of(plan), plan.recompute, 1, plan.tensor)
    assert trace.recording is not None
    update = _updates(sketch, plan)[0]
    busy = plan.microbatches * kernels(device, trace.recording, plan) + kernels(device, update, plan)
    modules = split_modules(sketch, plan)
    host = STEP + plan.microbatches * (_host(trace) + modules * SPLIT) + _launched(update, "update")
    compute = max(busy, host)
    return StepTime(
        compute=compute,
        communication=_split(plan, trace.recording, fabric)
        + max(0.0, _exchanged(sketch, plan, fabric) - OVERLAP * compute),
        spread=SPREAD,
        calibrated=False,
        busy=busy,
    )


def _pipelined(sketch: Sketch, plan: Plan, samples: int, fabric: Fabric) -> StepTime:
    """Foresees a step of a pipeline, pass by pass; the process that has most is what the others wait for."""
    passes, owned = PipelinePasses(sketch, plan, samples), stage_parameters(sketch, plan)
    device = fabric.device
    on_gpu = passes.parts(lambda one: device.kernel(one, plan.precision))
    ahead, back = (passes.parts(lambda one, way=way: _launch(one, way)) for way in ("forward", "backward"))
    took = {
        key: max(part.kernels, PASS + (ahead if key[0] == "forward" else back)[key].kernels)
        for key, part in on_gpu.items()
    }

    def message(size: float) -> float:
        return fabric.message(size, plan.pipeline, plan.processes // plan.pipeline)

    simulated = passes.simulated(took, message)
    kernels_alone = passes.simulated({key: part.kernels for key, part in on_gpu.items()}, message)
    updates = _updates(sketch, plan)
    updated = max(max(kernels(device, one, plan), STEP + _launched(one, "update")) for one in updates)
    largest = max(sum(one.size for one in own if one.trained) for own in owned)
    return StepTime(
        compute=max(simulated.busy) + updated,
        bubble=simulated.bubble,
        communication=fabric.all_reduce(largest, plan.replicate),
        spread=SPREAD,
        calibrated=False,
        busy=max(kernels_alone.busy) + max(kernels(device, one, plan) for one in updates),
    )


def _updates(sketch: Sketch, plan: Plan) -> list[Recording]:
    return [
        update_recording(sketch.task, sketch.mode, named, foreach=True)
        for named in updated_parts(sketch, plan)
    ]


def _host(trace: Trace) -> float:
    """Computes the seconds in which the host launches a microbatch's kernels."""
    assert trace.recording is not None
    loss = next(number for number, mark in enumerate(trace.marks) if mark.kind == LOSS)
    return sum(
        _launch(one, "forward" if one.mark <= loss else "backward") for one in trace.recording.operators
    )


def _launched(recording: Recording, phase: str) -> float:
    return sum(_launch(one, phase) for one in recording.operators)


def _launch(one: Operator, phase: str) -> float:
    return LAUNCH["view" if one.view else phase]


def _split(plan: Plan, recording: Recording, fabric: Fabric) -> float:
    """Computes the seconds of the messages of modules that are split: what comes next waits for each."""
    parts = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}
    return plan.microbatches * sum(
        LEAST + parts[collective] * fabric.all_reduce(size, plan.tensor)
        for collective, size in recording.messages
    )


def _exchanged(sketch: Sketch, plan: Plan, fabric: Fabric) -> float:
    """Computes the seconds of a step's messages, overlapped or not: gathering and reducing take half each.

    Replicas of shards reduce the gradients of their own shard alone.
    """
    size = sum(one.size for one in sketch.parameters if one.trained)
    across = fabric.all_reduce(size / plan.shard, plan.replicate, plan.shard)
    if plan.shard == 1:
        return across
    gathers = plan.microbatches * (2 if plan.zero == 3 else 1)
    reductions = 1 if plan.zero == 1 else plan.microbatches
    return (gathers + reductions) * fabric.all_reduce(size, plan.shard) / 2 + reductions * across
