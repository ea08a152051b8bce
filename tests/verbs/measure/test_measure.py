"""grappe measure in real processes: a slow loader, a slow process and a small batch, each planted, each named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grappe.errors import UsageError
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import MeasureOptions
from grappe.verbs.measure.table import table, write
from tests.sleeping import Sleeping

PLAN = "device=cpu,threads=1"


def measured(task: Sleeping, *plans: str, **options):
    batch_size = options.pop("batch_size", ())
    return verb.measure(
        task, plans, options=MeasureOptions(steps=5, repeats=1, batch_size=batch_size), **options
    )


def test_a_slow_loader_is_named_and_the_advice_is_tried() -> None:
    points = measured(Sleeping(load=0.01, ahead=0.01, backward=0.01), f"{PLAN},workers=0")
    told = "\n".join(verdict.sentences(points))
    assert "waits for data" in told
    workers = verdict.advised_workers(points[0])
    assert workers is not None
    assert f"use workers={workers}" in told
    (better,) = [point for point in points if point.origin == "advice" and point.workers == workers]
    assert better.share("data") < points[0].share("data")


def test_a_slow_process_is_named() -> None:
    points = measured(Sleeping(ahead=0.01, late=0.04), f"{PLAN},replicate=2", advise=False)
    told = "\n".join(verdict.sentences(points))
    assert "process 1 on" in told
    assert "most of it in forward" in told
    assert points[0].imbalance * points[0].batch == pytest.approx(0.04, rel=0.5)


def test_a_small_batch_is_named_and_a_plan_that_fails_is_a_row(tmp_path: Path) -> None:
    lines: list[str] = []
    plans = (PLAN, f"{PLAN},tensor=2,batchnorm=sync")
    points = measured(
        Sleeping(ahead=0.01, backward=0.01), *plans, batch_size=(2, 16), advise=False, note=lines.append
    )
    assert [(point.batch, bool(point.failure)) for point in points] == [
        (2, False),
        (2, True),
        (16, False),
        (16, True),
    ]
    assert "slices of 2 samples are small" in "\n".join(verdict.sentences(points))
    assert points[0].flops == pytest.approx(2 * 2 * (9 + 6) + 2 * 6)  # no gradient of the first layer's input
    assert points[0].trials[0].processes[0].held["parameters"] == 4 * (12 + 8)
    assert len(lines) == 4
    file = tmp_path / "m.json"
    write(points, "sleeping", file)
    known = json.loads(file.read_text())
    assert known["points"][2]["speed_up"] > 4
    assert "batchnorm=sync" in known["points"][1]["failure"]
    assert table(points).row_count == 4
    with pytest.raises(UsageError, match="cannot be written"):
        write(points, "sleeping", tmp_path)


@pytest.mark.parametrize("options", [{"steps": 0}, {"repeats": 0}, {"batch_size": (4, 0)}])
def test_nothing_to_measure_is_refused(options) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        verb.measure(Sleeping(), (PLAN,), options=MeasureOptions(**options))


def test_when_every_plan_fails_the_reason_is_told() -> None:
    with pytest.raises(UsageError, match=r"nothing could be measured: .*batchnorm=sync"):
        measured(Sleeping(), "device=cpu,tensor=2,batchnorm=sync")
