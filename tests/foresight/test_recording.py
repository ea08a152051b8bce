"""A recording has each operator of a step, what it computes and moves, and which share a call."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from grappe.foresight.recording import Recording
from grappe.foresight.sketch import Sketch
from grappe.foresight.update import update_recording
from tests.foresight.test_sketch import Normal, Small

ROWS, WIDTH, CLASSES = 4, 8, 3


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    return Sketch(Small(), Path("data"), records=True)


def of_trace(sketch: Sketch) -> Recording:
    found = sketch.trace(ROWS).recording
    assert found is not None
    return found


def test_matrix_products_have_their_flops_and_the_same_ones_are_one_call(sketch: Sketch) -> None:
    recording = of_trace(sketch)
    products = [one for one in recording.operators if one.name in ("aten.mm.default", "aten.addmm.default")]
    assert products[0].flops == 2 * ROWS * WIDTH * WIDTH
    # The matrix is called three times, tied once; the frozen layer has another shape.
    forward = [one.key for one in products if one.flops == 2 * ROWS * WIDTH * WIDTH and not one.view]
    assert max(forward.count(key) for key in forward) == 3
    assert products[0].moved == 4 * (ROWS * WIDTH + WIDTH * WIDTH + ROWS * WIDTH)


def test_views_compute_nothing_and_are_marked(sketch: Sketch) -> None:
    recording = of_trace(sketch)
    names = {one.name for one in recording.operators if one.view}
    assert "aten.t.default" in names
    assert not names & {"aten.mm.default", "aten.add.Tensor"}
    assert sum(recording.counts.values()) == len(recording.operators)


def test_a_trace_without_records_keeps_none() -> None:
    assert Sketch(Small(), Path("data")).trace(ROWS).recording is None


def test_the_update_is_recorded_on_the_shapes_of_a_part(sketch: Sketch) -> None:
    whole = update_recording(sketch.task, sketch.mode, [("a", (8, 8), torch.float32)])
    half = update_recording(sketch.task, sketch.mode, [("a", (4, 8), torch.float32)])
    assert whole.positive
    assert len(whole.operators) == len(half.operators) > 3
    assert max(one.moved for one in whole.operators) == 2 * max(one.moved for one in half.operators)
    assert update_recording(sketch.task, sketch.mode, []).operators == ()


def test_a_clipped_gradient_is_measured_and_scaled_before_the_update(sketch: Sketch) -> None:
    named = [("a", (8, 8), torch.float32)]
    plain, clipped = (
        [one.name for one in update_recording(task, sketch.mode, named).operators]
        for task in (sketch.task, dataclasses.replace(sketch.task, clip=1.0))
    )
    assert clipped[-len(plain) :] == plain
    assert any("_foreach_norm" in name or "norm" in name for name in clipped[: -len(plain)])


def test_the_most_that_a_recording_takes_is_that_of_the_trace_and_its_gradients() -> None:
    sketch = Sketch(Normal(), Path("data"), records=True)
    trace = sketch.trace(ROWS)
    assert trace.recording is not None
    given = sum(size for _, size, _ in trace.recording.given)
    most = max(max(mark.peak, mark.level) for mark in trace.marks)
    without = dataclasses.replace(trace.recording, gradients=frozenset())
    assert given < without.peak <= given + most
    assert without.peak >= most
    gradients = sum(one.size for one in sketch.parameters)
    assert without.peak <= trace.recording.peak <= without.peak + gradients


def test_each_parameter_has_a_gradient() -> None:
    sketch = Sketch(Normal(), Path("data"), records=True)
    trained = [one for one in sketch.parameters if one.trained]
    assert len(of_trace(sketch).gradients) == len(trained)
