"""Predicted bytes are those of real runs: states to the byte, the peak of torch's allocator closely."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.foresee import measured_cell

from grappe.foresight.compose import needs
from grappe.foresight.kernels import Kernels
from grappe.foresight.sketch import Sketch
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource

EXACT = 0.002  # of the peak: bytes of scalars, of the loss's sum
TINY_GPT = {"width": 32, "depth": 2, "heads": 2, "batch_size": 8, "megabytes": 0.3}


@pytest.fixture(scope="module")
def gpt() -> Sketch:
    return Sketch(PySource(**TINY_GPT), Path("data"), kernels=Kernels())


@pytest.mark.parametrize("plan", ["", "replicate=2,microbatches=2"])
def test_the_peak_of_a_convolutional_network(plan: str) -> None:
    found = needs(Sketch(Digits(), Path("data"), kernels=Kernels()), Plan.parse(plan))
    measured = max(one["peak"] for one in measured_cell("digits", plan))
    copy = found.states.gradients if plan else 0  # which gloo's threads may hold for a moment longer
    assert found.peak is not None
    assert found.peak * (1 - EXACT) <= measured <= (found.peak + copy) * (1 + EXACT)


@pytest.mark.parametrize("plan", ["", "replicate=2"])
def test_an_evaluation_and_the_copy_for_a_checkpoint(plan: str) -> None:
    found = needs(Sketch(Digits(), Path("data"), kernels=Kernels()), Plan.parse(plan))
    measured = measured_cell("digits", plan, between=True)
    copy = found.states.gradients if plan else 0
    most = max(one["evaluation"] for one in measured)
    assert found.evaluation is not None
    assert found.evaluation * (1 - EXACT) <= most <= (found.evaluation + copy) * (1 + EXACT)
    assert found.checkpoint == max(one["checkpoint"] for one in measured)


def test_an_evaluation_of_a_sharded_transformer_takes_no_less_than_is_foreseen(gpt: Sketch) -> None:
    words = " ".join(f"{name}={value}" for name, value in TINY_GPT.items())
    found = needs(gpt, Plan.parse("shard=2"))
    measured = measured_cell(f"pysource {words}", "shard=2", between=True)
    assert found.evaluation_least is not None  # how much more depends on gloo's threads
    assert found.evaluation_least * (1 - EXACT) <= max(one["evaluation"] for one in measured)
    assert found.checkpoint == pytest.approx(max(one["checkpoint"] for one in measured), rel=EXACT)


@pytest.mark.parametrize(
    "plan", ["shard=2,zero=1", "shard=2", "pipeline=2,microbatches=2", "tensor=2", "offload=cpu"]
)
def test_the_states_of_a_transformer_to_the_byte(plan: str, gpt: Sketch) -> None:
    words = " ".join(f"{name}={value}" for name, value in TINY_GPT.items())
    held = [one["held"] for one in measured_cell(f"pysource {words}", plan)]
    states = needs(gpt, Plan.parse(plan)).states
    found = {name: getattr(states, name) for name in ("parameters", "gradients", "optimizer")}
    assert found in held and sum(found.values()) == max(sum(one.values()) for one in held)
