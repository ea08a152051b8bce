"""The trace of operators: what kind each is, which of the user's lines called it, and what its kernels took."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from grappe.profiling.chronometer import Chronometer
from grappe.profiling.kernel_times import by_call
from grappe.profiling.operator_sums import TINY, Call, Floor, kernel, summarised
from grappe.profiling.operators import LABEL, OperatorTrace, least
from grappe.profiling.other_precision import Weights
from grappe.profiling.phases import BACKWARD, COMMUNICATION, FORWARD, UPDATE

FLOOR = Floor(gap=1e-6, seconds=2e-6, plain=1e-6)


def traced(step, *, other: torch.dtype | None = None, phases=(FORWARD,), steps: int = 2):
    """The trace of `step(phase)` in each of `phases`, a few times; tried in `other` once more."""
    clock = Chronometer(torch.device("cpu"), 0.0)
    trace = OperatorTrace(clock, other)
    with trace:
        for number in range(steps + (other is not None)):
            for phase in phases:
                clock.switch(phase)
                step(phase)
            clock.switch(UPDATE)
            trace.end_step(then_try=number + 1 >= steps)
    return trace.result(FLOOR)


def call(name: str = "add", kind: str = "other", size: int = TINY + 1, **fields) -> Call:
    known = {"line": "", "gap": 1e-6, "seconds": 1e-3, "flops": 0, **fields}
    return Call(name, kind, size=size, **{**known, "kernel": fields.get("kernel", known["seconds"] - 2e-6)})


def test_products_copies_and_reads_are_told_apart_and_have_their_line() -> None:
    a, b = torch.randn(256, 128), torch.randn(128, 64)

    def step(phase: int) -> None:
        c = a @ b
        c.t().contiguous()
        c.bfloat16()
        c.sum().item()

    found = traced(step)
    assert found is not None
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
    assert found is not None
    assert found.flops == 2 * 2 * 16 * 64 * 32  # the output, and the gradient of the weight


def test_products_are_tried_in_another_precision() -> None:
    a = torch.randn(512, 512)
    found = traced(lambda phase: a @ a, other=torch.bfloat16)
    assert found is not None
    assert found.other_part is not None
    assert found.operators == 1  # what was tried is no operator of the step
    assert traced(lambda phase: a @ a).other_part is None


def test_views_and_tiny_operators_take_no_kernel() -> None:
    x = torch.randn(64, 1024)
    found = traced(lambda phase: x.t().unbind(0))
    assert found is not None
    assert (found.kernels, found.operators) == (0, 2)
    small = torch.ones(8)
    found = traced(lambda phase: small + 1)
    assert found is not None
    assert found.kernels == 0
    assert found.host > 0


def test_of_equal_steps_the_median_counts_and_of_others_the_mean() -> None:
    steps = [[call(kernel=seconds)] for seconds in (1.0, 2.0, 30.0)]
    assert summarised(steps, (), FLOOR, on_device=True).elementwise == 2
    steps[0].append(call("mul", kernel=3.0))
    assert summarised(steps, (), FLOOR, on_device=True).elementwise == pytest.approx(12)


def test_the_host_is_gaps_and_calls() -> None:
    calls = [
        call(gap=5e-6, line="task.py:3"),
        call(gap=1e-6, kind="read", line="task.py:4", size=4, seconds=1e-6),
    ]
    found = summarised([calls], (), FLOOR, on_device=False)
    assert found.host == pytest.approx(5e-6 + 2e-6 + 1e-6 + 1e-6)
    assert found.reads == 0  # its two microseconds are what the trace itself adds
    assert found.host_lines[0].line == "task.py:3"


def test_lines_that_read_count_without_the_time_of_the_trace() -> None:
    """Two operators at a line that reads: 30 and 5 microseconds, of which the trace took 2 each."""
    calls = [
        call(gap=10e-6, seconds=20e-6, size=4, line="task.py:4"),
        call(gap=2e-6, seconds=3e-6, size=4, line="task.py:4", kind="read"),
        call(gap=8e-6, line="task.py:5"),
    ]
    found = summarised([calls], (), FLOOR, on_device=False)
    assert found.reads == pytest.approx(31e-6)
    assert found.read_lines[0].calls == 1


def test_reads_take_what_kernels_leave_of_their_modules_seconds() -> None:
    """A module of 50 microseconds without a trace: kernels take 20, and two thirds of the rest a line that reads."""
    calls = [
        call(gap=10e-6, seconds=20e-6, size=4, line="task.py:4", module=1, kernel=20e-6),
        call(gap=9e-6, seconds=1e-6, size=4, line="task.py:4", kind="read", module=1, kernel=0.0),
        call(gap=19e-6, seconds=1e-6, size=4, line="task.py:5", module=1, kernel=0.0),
        call(gap=10e-6, line="task.py:6", module=2),
    ]
    found = summarised([calls], (), FLOOR, {1: 50e-6, 2: 1.0}, on_device=False)
    assert found.reads == pytest.approx(30e-6 * 40 / 60)
    unknown = summarised([calls], (), FLOOR, {2: 1.0}, on_device=False)
    assert unknown.reads == summarised([calls], (), FLOOR, on_device=False).reads


def test_what_fills_messages_and_calls_collectives_is_no_computing() -> None:
    x = torch.randn(512, 512)

    def step(phase: int) -> None:
        x + 1

    found = traced(step, phases=(FORWARD, COMMUNICATION))
    assert found is not None
    assert found.operators == 1
    assert found.messages > 0
    launched = Call("all_reduce", "launch", "", 0.0, 5e-3, 0, 0)
    assert kernel(launched, FLOOR) == 5e-3
    summed = summarised([[call(), launched._replace(kernel=5e-3)]], (), FLOOR, on_device=False)
    assert (summed.launches, summed.operators) == (5e-3, 1)
    assert summed.host == pytest.approx(3e-6)


def test_a_copy_costs_the_freeing_of_its_memory_too() -> None:
    copied = call("clone", "copy", line="task.py:4")
    tried = [copied._replace(other=seconds) for seconds in (1e-4, 3e-4)]
    found = summarised([[copied, call()]], tried, FLOOR, on_device=False)
    assert found.copies == pytest.approx(copied.kernel + 2e-4)
    assert found.copy_lines[0].seconds == pytest.approx(found.copies)
    assert found.other_part is None
    x = torch.randn(2048, 1024)
    seen = traced(lambda phase: x.t().contiguous(), other=torch.bfloat16)
    assert seen is not None
    assert seen.copies > 0


def test_a_modules_seconds_without_a_trace_have_the_freeing_in_them() -> None:
    """A module of 30 ms: of its copy's kernel, 9 ms, of freeing, 6 ms, and of the host, 10 ms; 5 ms are more memory."""
    copied = call("clone", "copy", line="task.py:4", kernel=9e-3, gap=10e-3 - 2e-6, module=1)
    tried = [copied._replace(other=6e-3)]
    found = summarised([[copied]], tried, FLOOR, {1: 30e-3}, on_device=False)
    assert found.copies == pytest.approx(20e-3)
    assert found.copies + found.host == pytest.approx(30e-3)
    short = summarised([[copied]], tried, FLOOR, {1: 22e-3}, on_device=False)
    assert short.copies == pytest.approx(15e-3)  # as traced, where a module's seconds leave no more


def test_weights_are_known_by_their_place_and_gradients_by_their_shape() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weights = Weights([("w", weight)])
    assert weights.read(weight.detach().t())
    assert not weights.read(torch.ones(3, 4))
    assert weights.like(torch.ones(4, 3))
    assert not weights.like(torch.ones(4, 4))


def test_the_least_of_an_operator_is_not_nothing() -> None:
    found = least(Chronometer(torch.device("cpu"), 0.0))
    assert min(found) > 0
    assert found.traces >= 0


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
    assert by_call(events) == pytest.approx({0: 20e-6, 12: 5e-6})
