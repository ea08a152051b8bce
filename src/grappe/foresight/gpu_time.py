"""GPU time: a plan's step on a GPU that is not here, from its data sheet and the operators of a trace."""

from __future__ import annotations

from grappe.errors import PlanError
from grappe.foresight.devices import LAUNCH, STEP, Device, kernels
from grappe.foresight.partition import largest_rows, precision_of
from grappe.foresight.recording import Recording
from grappe.foresight.sharding import rows_of
from grappe.foresight.sketch import Sketch
from grappe.foresight.step_time import UNTIMED, StepTime
from grappe.foresight.trace import LOSS, Trace
from grappe.foresight.update import update_recording
from grappe.plan import Plan

SPREAD = 0.5
"""Relative uncertainty of what no such GPU was measured for."""
OVERLAP = 0.5  # of the computing, during which messages travel unnoticed


def gpu_time(
    sketch: Sketch, plan: Plan, device: Device, *, batch: int | None = None, node: int = 1
) -> StepTime:
    """Foresees a step of `plan`, one process on each GPU; kernels by roofline, the host by operators.

    Args:
        sketch: made with `records`.
        node: GPUs of a node, beyond which no link is known.

    Raises:
        PlanError: the plan's time is not foreseen.
        TaskError: the task cannot be traced.
    """
    for key in (*UNTIMED, "pipeline"):
        if key in plan.changed_keys():
            raise PlanError(f"{key}: its time on a GPU is not foreseen; grappe measure runs any plan")
    if plan.processes > max(1, node):
        raise PlanError(
            f"{plan.processes} GPUs, and a node has {node}: the time between nodes is not foreseen"
        )
    device.flops(plan.precision)
    rows = largest_rows(sketch, plan, batch or sketch.task.batch_size)
    trace = sketch.trace(rows, precision_of(plan), plan.recompute, 1)
    assert trace.recording is not None
    update = _update(sketch, plan)
    busy = plan.microbatches * kernels(device, trace.recording, plan) + kernels(device, update, plan)
    host = STEP + plan.microbatches * _host(trace) + _launched(update, "update")
    compute = max(busy, host)
    return StepTime(
        compute=compute,
        communication=max(0.0, _exchanged(sketch, plan, device) - OVERLAP * compute),
        spread=SPREAD,
        calibrated=False,
        busy=busy,
    )


def _update(sketch: Sketch, plan: Plan) -> Recording:
    import torch

    named = [
        (
            one.name,
            (rows_of(one, plan.shard, 0), *one.shape[1:]) if plan.shard > 1 and one.shape else one.shape,
            torch.float32,
        )
        for one in sketch.parameters
        if one.trained
    ]
    return update_recording(sketch.task, sketch.mode, named, foreach=True)


def _host(trace: Trace) -> float:
    """Computes the seconds in which the host launches a microbatch's kernels."""
    assert trace.recording is not None
    loss = next(number for number, mark in enumerate(trace.marks) if mark.kind == LOSS)
    return sum(
        LAUNCH["view"] if one.view else LAUNCH["forward" if one.mark <= loss else "backward"]
        for one in trace.recording.operators
    )


def _launched(recording: Recording, phase: str) -> float:
    return sum(LAUNCH["view" if one.view else phase] for one in recording.operators)


def _exchanged(sketch: Sketch, plan: Plan, device: Device) -> float:
    """Computes the seconds of a step's messages, overlapped or not: gathering and reducing take half each."""
    if plan.processes == 1:
        return 0.0
    size = sum(one.size for one in sketch.parameters if one.trained)
    reduced = device.all_reduce(size, plan.processes)
    if plan.shard == 1:
        return reduced
    gathers = plan.microbatches * (2 if plan.zero == 3 else 1)
    reductions = 1 if plan.zero == 1 else plan.microbatches
    return (gathers + reductions) * reduced / 2
