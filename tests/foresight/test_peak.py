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
    assert found.peak is not None
    assert found.peak * (1 - EXACT) <= measured <= found.peak * (1 + EXACT)


@pytest.mark.parametrize("plan", ["", "replicate=2"])
def test_an_evaluation_and_the_copy_for_a_checkpoint(plan: str) -> None:
    found = needs(Sketch(Digits(), Path("data"), kernels=Kernels()), Plan.parse(plan))
    measured = measured_cell("digits", plan, between=True)
    most = max(one["evaluation"] for one in measured)
    assert found.evaluation is not None
    assert found.evaluation * (1 - EXACT) <= most <= found.evaluation * (1 + EXACT)
    assert found.checkpoint == max(one["checkpoint"] for one in measured)


def test_an_evaluation_of_a_sharded_transformer(gpt: Sketch) -> None:
    words = " ".join(f"{name}={value}" for name, value in TINY_GPT.items())
    found = needs(gpt, Plan.parse("shard=2"))
    measured = measured_cell(f"pysource {words}", "shard=2", between=True)
    most = max(one["evaluation"] for one in measured)
    assert found.evaluation_least is not None and found.evaluation is not None
    assert found.evaluation_least * (1 - EXACT) <= most <= found.evaluation * (1 + EXACT)
    assert found.checkpoint == pytest.approx(max(one["checkpoint"] for one in measured), rel=EXACT)


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2,zero=1,microbatches=2",
        "shard=2",
        "pipeline=2,microbatches=2",
        "pipeline=2,microbatches=4,schedule=gpipe",
        "tensor=2",
        "offload=cpu",
    ],
)
def test_a_transformer_has_states_to_the_byte_and_a_peak_in_the_range(plan: str, gpt: Sketch) -> None:
    words = " ".join(f"{name}={value}" for name, value in TINY_GPT.items())
    measured, found = measured_cell(f"pysource {words}", plan), needs(gpt, Plan.parse(plan))
    held = [one["held"] for one in measured]
    states = {name: getattr(found.states, name) for name in ("parameters", "gradients", "optimizer")}
    assert states in held and sum(states.values()) == max(sum(one.values()) for one in held)
    most = max(one["peak"] for one in measured)
    assert found.least is not None and found.peak is not None
    assert found.least * (1 - EXACT) <= most <= found.peak * (1 + EXACT)
