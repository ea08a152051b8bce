"""The trace of operators: what kind each is, which of the user's lines called it, and what its kernels took."""

import types

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from grappe.contrib.lab.operators import LABEL, OperatorTrace, kernels_by_call
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, FORWARD, UPDATE


def traced(step, *, phases=(FORWARD,), steps: int = 3):
    """The costs of `step(phase)` in each of `phases`, a few times, by kind."""
    clock = Chronometer(torch.device("cpu"), 0.0)
    trace = OperatorTrace(clock)
    with trace:
        for _ in range(steps):
            for phase in phases:
                clock.switch(phase)
                step(phase)
            clock.switch(UPDATE)
            trace.end_step()
    return trace.costs()


def of_kind(costs, kind: str):
    return [cost for cost in costs if cost.kind == kind]


def test_products_copies_and_reads_are_told_apart_and_have_their_line() -> None:
    a, b = torch.randn(256, 128), torch.randn(128, 64)

    def step(phase: int) -> None:
        c = a @ b
        c.t().contiguous()
        c.bfloat16()
        c.sum().item()

    found, line = traced(step), step.__code__.co_firstlineno
    (product,), (copied,), (read,) = (of_kind(found, kind) for kind in ("matrix", "copy", "read"))
    assert (product.flops, product.line) == (2 * 256 * 128 * 64, f"{__file__}:{line + 1}")
    assert (copied.line, read.line) == (f"{__file__}:{line + 2}", f"{__file__}:{line + 4}")
    assert min(product.kernel, copied.kernel, read.host) > 0 == read.kernel
    assert {cost.line for cost in of_kind(found, "other")} == {f"{__file__}:{line + more}" for more in (2, 3, 4)}
    assert all(cost.calls == 1 for cost in found)


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
    # The output, and the gradient of the weight.
    assert sum(cost.flops for cost in found) == 2 * 2 * 16 * 64 * 32


def test_views_and_tiny_operators_take_no_kernel_and_their_calls_are_the_hosts() -> None:
    x, small = torch.randn(64, 1024), torch.ones(8)
    (found,) = traced(lambda phase: (x.t().unbind(0), small + 1))
    assert (found.calls, found.kernel) == (3, 0)
    assert found.host > 0


def test_of_steps_the_median_counts() -> None:
    """The second step has a hundred times the operators."""
    x, number = torch.randn(64, 1024), iter((1, 100, 1))
    (found,) = traced(lambda phase: [x + 1 for _ in range(next(number))])
    assert found.calls == 1
    assert found.kernel > 0


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
