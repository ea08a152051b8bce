"""grappe measure --why in real processes: planted slownesses, large against noise, are named first; sums are 100 %."""

import json

import pytest
from benchmarks.slownesses import Planted

from grappe.contrib.lab.explain import Explanation, explain
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import MeasureOptions
from grappe.verbs.measure.verdict import content
from tests.sleeping import Sleeping

pytestmark = pytest.mark.slow

PLAN = "device=cpu,threads=1,workers=0"


def explained(task, plan: str = PLAN, **options) -> tuple[Explanation, list]:
    """Explains a few steps of `task`; the sum of its parts is checked."""
    options = MeasureOptions(steps=3, repeats=1, **{"evaluate_every": 10**6, "save_every": 10**6, **options})
    points = verb.measure(task, (plan,), options=options)
    (found,) = explain(task, points, options=options)
    assert found.breakdown is not None, found.failure
    assert sum(found.breakdown.parts.values()) == pytest.approx(found.breakdown.seconds)
    return found, points


PLANS = (
    "shard=2,zero=1",
    "pipeline=2,microbatches=4,schedule=gpipe",
    "recompute,precision=bf16",
    "offload=cpu",
    "replicate=2,exact=4",
    "engine=textbook,replicate=2",
)


def test_every_kind_of_plan_is_divided_and_has_a_verdict() -> None:
    options = MeasureOptions(steps=3, repeats=1)
    task = Planted(validation=64, width=32, layers=4)
    points = verb.measure(task, [f"device=cpu,threads=1,{one}" for one in PLANS], options=options)
    assert [one.failure for one in points] == [""] * len(PLANS)
    assert verdict.sentences(points)
    for one in explain(task, points, options=options):
        assert one.breakdown is not None, one.failure
        assert sum(one.breakdown.parts.values()) == pytest.approx(one.breakdown.seconds)
        assert min(one.breakdown.parts.values()) >= -1e-12
        pipeline = "pipeline" in one.plan
        assert pipeline or not one.breakdown.parts["pipeline bubble"]
        assert not (pipeline and any("gradient" in remedy.word for remedy in one.remedies))
        seen = one.breakdown.trace.processes[0].operators
        assert seen is not None and seen.flops > 0
        assert seen.launches > 0 or "shard" not in one.plan  # FSDP calls collectives while it computes


def test_tiny_operators_and_the_file_for_a_report() -> None:
    found, points = explained(Planted(operators=1500, width=32))
    assert found.remedies[0].part == "host between kernels"
    assert "1,500 of them at slownesses.py" in found.remedies[0].word
    known = json.loads(json.dumps(content(points, "planted", explanations=[found])))["why"][0]
    assert sum(known["parts"].values()) == pytest.approx(1)


def test_values_that_are_read() -> None:
    found, _ = explained(Planted(reads="item", batch_size=1024, width=32))
    assert found.remedies[0].part == "values read by the host"
    assert "slownesses.py" in found.remedies[0].word
    assert "1,024 times a step" in found.remedies[0].word


def test_evaluations_that_are_too_frequent_and_a_slow_loader() -> None:
    slow = Sleeping(load=0.02)
    assert explained(slow)[0].remedies[0].part == "waiting for data"
    often = Sleeping(ahead=0.02)  # an evaluation of 16 samples is two batches
    found, _ = explained(often, evaluate_every=1)
    assert found.breakdown.share("evaluation") > 0.2
    assert "evaluation" in [one.part for one in found.remedies[:2]]
