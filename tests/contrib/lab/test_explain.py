"""grappe measure --why in real processes: planted slownesses, large against noise, are named first; sums are 100 %."""

import dataclasses
import json

import pytest
from benchmarks.slownesses import Planted

from grappe.contrib.lab.breakdown import TimeBreakdown
from grappe.contrib.lab.explain import explain
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import MeasureOptions
from grappe.verbs.measure.verdict import content
from tests.sleeping import Sleeping

pytestmark = pytest.mark.slow

PLANS = (
    "shard=2,zero=1",
    "pipeline=2,microbatches=4,schedule=gpipe",
    "recompute,precision=bf16",
    "offload=cpu",
    "replicate=2,exact=4",
    "engine=textbook,replicate=2",
)


def explained(task, *plans: str) -> tuple[list[TimeBreakdown], list]:
    """Explains a few steps of `task`; each sum of parts is checked."""
    points = verb.measure(task, plans, options=MeasureOptions(steps=3, repeats=1))
    assert [one.failure for one in points] == [""] * len(points)
    found = explain(task, points)
    for one, point in zip(found, points, strict=True):
        assert not one.failure
        assert min(one.parts.values()) >= -1e-12
        longest = max(sum(process.phases.values()) for process in point.middle().processes)
        assert 0 < one.seconds <= longest + 1e-9
        assert sum(one.parts.values()) == pytest.approx(1)
    return found, points


def test_every_kind_of_plan_is_divided_and_has_a_verdict() -> None:
    task = Planted(width=32, layers=4)
    found, points = explained(task, *(f"device=cpu,threads=1,{one}" for one in PLANS))
    assert verdict.sentences(points)
    for one in found:
        assert one.parts["not explained"] < 1
        assert one.parts["waiting for other processes"] > 0 or "shard" not in one.plan


def test_tiny_operators_and_the_file_for_a_report() -> None:
    (found,), points = explained(Planted(operators=1500, width=32), "device=cpu,threads=1")
    assert found.remedies[0].part == "host between kernels"
    assert "1,500 of them at slownesses.py" in found.remedies[0].word
    known = json.loads(json.dumps(content(points, "planted", why=[dataclasses.asdict(found)])))["why"][0]
    assert known["remedies"][0]["part"] == "host between kernels"


def test_values_that_are_read() -> None:
    (found,), _ = explained(Planted(reads="item", batch_size=1024, width=32), "device=cpu,threads=1")
    assert found.remedies[0].part == "values read by the host"
    assert "slownesses.py" in found.remedies[0].word
    assert "1,024 times a step" in found.remedies[0].word


def test_a_slow_loader() -> None:
    (found,), _ = explained(Sleeping(load=0.02), "device=cpu,threads=1,workers=0")
    assert found.remedies[0].part == "waiting for data"
