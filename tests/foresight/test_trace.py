"""A ledger has each operator of a step, what it computes and moves."""

from pathlib import Path

from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.trace import Operator
from grappe.plan import Plan
from grappe.tasks.pysource import PySource
from tests.foresight.test_fake_model import Small

ROWS, WIDTH = 4, 8


def operators() -> tuple[Operator, ...]:
    return FakeModel(Small(), Path("data"), records=True).trace(ROWS).operators


def test_matrix_products_have_their_flops_and_bytes() -> None:
    products = [one for one in operators() if one.name in ("aten.mm.default", "aten.addmm.default")]
    # The matrix is called three times, tied once; the frozen layer has another shape.
    square = [one for one in products if one.flops == 2 * ROWS * WIDTH * WIDTH]
    assert len(square) >= 3 and not any(one.view for one in square)
    assert products[0].flops == 2 * ROWS * WIDTH * WIDTH
    assert products[0].moved == 4 * (ROWS * WIDTH + WIDTH * WIDTH + ROWS * WIDTH)


def test_views_compute_nothing_and_are_marked() -> None:
    names = {one.name for one in operators() if one.view}
    assert "aten.t.default" in names
    assert not names & {"aten.mm.default", "aten.add.Tensor"}


def test_a_trace_without_records_keeps_none() -> None:
    assert FakeModel(Small(), Path("data")).trace(ROWS).operators == ()


def test_split_modules_send_messages(tmp_path: Path) -> None:
    task = PySource(width=32, depth=2, heads=2, batch_size=8, megabytes=0.3)
    fake_model = FakeModel(task, tmp_path, records=True)
    trace = fake_model.trace(8, tensor=2)
    sent = [one for one in trace.operators if one.collective is not None]
    assert {one.collective for one in sent} == {"all_reduce"} and len(sent) >= 2 * 4  # two of a block each way
    assert all(one.message > 0 and not one.view for one in sent)
    found = memory_forecast(fake_model, Plan.parse("tensor=2"))  # gloo's thread may be late with one
    assert found.peak - found.least == trace.message == max(one.message for one in sent)
