"""The trace of operators: what kind each is, which of the user's lines called it, and what its kernels took."""

import types

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from grappe.contrib.lab.operators import (
    LABEL,
    TINY,
    OperatorCall,
    OperatorTrace,
    kernel,
    kernels_by_call,
    measure_dispatch,
    summed,
)
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, COMMUNICATION, FORWARD, UPDATE

DISPATCH = 2e-6


def traced(step, *, phases=(FORWARD,), steps: int = 2):
    """The trace of `step(phase)` in each of `phases`, a few times."""
    clock = Chronometer(torch.device("cpu"), 0.0)
    trace = OperatorTrace(clock)
    with trace:
        for _ in range(steps):
            for phase in phases:
                clock.switch(phase)
                step(phase)
            clock.switch(UPDATE)
            trace.end_step()
    return trace.totals(DISPATCH)


def kernels_of(totals) -> float:
    return totals.matrix + totals.copies + totals.casts + totals.elementwise


def call(name: str = "add", kind: str = "other", size: int = TINY + 1, **fields) -> OperatorCall:
    known = {"line": "", "gap": 1e-6, "seconds": 1e-3, "flops": 0, **fields}
    return OperatorCall(name, kind, size=size, **{**known, "kernel": fields.get("kernel", known["seconds"] - 2e-6)})


def test_products_copies_and_reads_are_told_apart_and_have_their_line() -> None:
    a, b = torch.randn(256, 128), torch.randn(128, 64)

    def step(phase: int) -> None:
        c = a @ b
        c.t().contiguous()
        c.bfloat16()
        c.sum().item()

    found = traced(step)
    assert found.flops == 2 * 256 * 128 * 64
    assert min(found.matrix, found.copies, found.casts) > 0
    (copied,) = found.copy_lines
    assert copied.line == f"{__file__}:{step.__code__.co_firstlineno + 2}"
    (read,) = found.read_lines
    assert read.line == f"{__file__}:{step.__code__.co_firstlineno + 4}"
    assert read.calls == 1
    assert 0 < found.reads < found.host


def test_only_forward_and_backward_are_traced_and_backward_has_its_flops() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(16, 64)

    def step(phase: int) -> None:
        if phase == FORWARD:
            step.loss = layer(x).sum()
        elif phase == BACKWARD:
            step.loss.backward()
        else:
            torch.randn(64, 64) @ torch.randn(64, 64)

    found = traced(step, phases=(FORWARD, BACKWARD, UPDATE))
    assert found.flops == 2 * 2 * 16 * 64 * 32  # the output, and the gradient of the weight


def test_views_and_tiny_operators_take_no_kernel() -> None:
    x = torch.randn(64, 1024)
    found = traced(lambda phase: x.t().unbind(0))
    assert (kernels_of(found), found.operators) == (0, 2)
    small = torch.ones(8)
    found = traced(lambda phase: small + 1)
    assert kernels_of(found) == 0
    assert found.host > 0


def test_of_equal_steps_the_median_counts_and_of_others_the_mean() -> None:
    steps = [[call(kernel=seconds)] for seconds in (1.0, 2.0, 30.0)]
    assert summed(steps, DISPATCH, on_device=True).elementwise == 2
    steps[0].append(call("mul", kernel=3.0))
    assert summed(steps, DISPATCH, on_device=True).elementwise == pytest.approx(12)


def test_the_host_is_gaps_and_calls() -> None:
    calls = [call(gap=5e-6, line="task.py:3"), call(gap=1e-6, kind="read", line="task.py:4", size=4, seconds=1e-6)]
    found = summed([calls], DISPATCH, on_device=False)
    assert found.host == pytest.approx(5e-6 + 2e-6 + 1e-6 + 1e-6)
    assert found.reads == pytest.approx(2e-6)
    assert found.host_lines[0].line == "task.py:3"


def test_lines_that_read_have_the_seconds_of_all_their_operators() -> None:
    """Two operators at a line that reads, of 30 and 5 microseconds."""
    calls = [
        call(gap=10e-6, seconds=20e-6, size=4, line="task.py:4"),
        call(gap=2e-6, seconds=3e-6, size=4, line="task.py:4", kind="read"),
        call(gap=8e-6, line="task.py:5"),
    ]
    found = summed([calls], DISPATCH, on_device=False)
    assert found.reads == pytest.approx(35e-6)
    assert found.host == pytest.approx(45e-6)
    assert found.read_lines[0].calls == 1
    assert [cost.line for cost in found.host_lines] == ["task.py:5"]


def test_what_fills_messages_and_calls_collectives_is_no_computing() -> None:
    x = torch.randn(512, 512)

    def step(phase: int) -> None:
        x + 1

    found = traced(step, phases=(FORWARD, COMMUNICATION))
    assert found.operators == 1
    assert found.messages > 0
    launched = OperatorCall("all_reduce", "launch", "", 0.0, 5e-3, 0, 0)
    assert kernel(launched, DISPATCH) == 5e-3
    totals = summed([[call(), launched._replace(kernel=5e-3)]], DISPATCH, on_device=False)
    assert (totals.launches, totals.operators) == (5e-3, 1)
    assert totals.host == pytest.approx(3e-6)


def test_the_dispatch_of_an_operator_is_not_nothing() -> None:
    assert measure_dispatch(Chronometer(torch.device("cpu"), 0.0)) > 0


def test_kernels_are_found_by_their_label() -> None:
    events = [
        types.SimpleNamespace(name=name, device_type=place, device_time_total=time)
        for name, place, time in (
            (f"{LABEL}0", DeviceType.CPU, 20.0),
            (f"{LABEL}0", DeviceType.CUDA, 20.0),  # the same on the GPU's timeline
            ("aten::mm", DeviceType.CPU, 20.0),
            (f"{LABEL}12", DeviceType.CPU, 5.0),
        )
    ]
    assert kernels_by_call(events) == pytest.approx({0: 20e-6, 12: 5e-6})
