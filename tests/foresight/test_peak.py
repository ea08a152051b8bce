"""Predicted bytes are those of real runs: states to the byte, the peak of torch's allocator closely."""

from pathlib import Path

import pytest
from benchmarks import foresee
from benchmarks.foresee import measured_cell

from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource
from grappe.tasks.volumes import Volumes
from tests.foresight import unusual

EXACT = 0.002  # of the peak: bytes of scalars, of the loss's sum
CLOSE = 0.01  # of peaks of less than 2 MB
TASKS = "tests/foresight/unusual.py"
ALSO_SHARDED = (unusual.Custom, unusual.Twice)
TINY_GPT = {"width": 32, "depth": 2, "heads": 2, "batch_size": 8, "megabytes": 0.3}


@pytest.fixture(scope="module")
def gpt() -> FakeModel:
    return FakeModel(PySource(**TINY_GPT), Path("data"), kernels=Kernels())


@pytest.mark.parametrize("plan", ["", "replicate=2,microbatches=2", "precision=fp64"])
def test_the_peak_of_a_convolutional_network(plan: str) -> None:
    found = memory_forecast(FakeModel(Digits(), Path("data"), kernels=Kernels()), Plan.parse(plan))
    measured = max(one["peak"] for one in measured_cell("digits", plan))
    assert found.peak * (1 - EXACT) <= measured <= found.peak * (1 + EXACT)


@pytest.mark.parametrize("plan", ["", "replicate=2", "precision=fp64"])
def test_an_evaluation_and_the_copy_for_a_checkpoint(plan: str) -> None:
    """Of 180 images two batches of 64 are whole: a forecast has the batch before, too, which is as large."""
    task = Digits(batch_size=32)
    found = memory_forecast(FakeModel(task, Path("data"), kernels=Kernels()), Plan.parse(plan))
    measured = measured_cell("digits batch_size=32", plan, between=True)
    most = max(one["evaluation"] for one in measured)
    assert found.evaluation * (1 - EXACT) <= most <= found.evaluation * (1 + EXACT)
    assert found.checkpoint == max(one["checkpoint"] for one in measured)


@pytest.mark.slow
def test_an_evaluation_of_a_sharded_transformer(gpt: FakeModel) -> None:
    words = " ".join(f"{name}={value}" for name, value in TINY_GPT.items())
    found = memory_forecast(gpt, Plan.parse("shard=2"))
    measured = measured_cell(f"{TASKS}:Unscored {words}", "shard=2", between=True)
    most = max(one["evaluation"] for one in measured)
    assert found.evaluation_least * (1 - EXACT) <= most <= found.evaluation * (1 + EXACT)
    assert found.checkpoint == pytest.approx(max(one["checkpoint"] for one in measured), rel=EXACT)


PLANS = """
shard=2,zero=1,microbatches=2 shard=2 pipeline=2,microbatches=4,schedule=gpipe tensor=2 offload=cpu
pipeline=2,microbatches=4,schedule=zero_bubble pipeline=2,shard=2,zero=1,microbatches=2 pipeline=2,microbatches=2
precision=fp64,pipeline=2,microbatches=2 pipeline=2,shard=2,microbatches=2
"""


@pytest.mark.parametrize("plan", PLANS.split())
def test_a_transformer_has_states_to_the_byte_and_a_peak_in_the_range(plan: str, gpt: FakeModel) -> None:
    words = " ".join(f"{name}={value}" for name, value in TINY_GPT.items())
    measured, found = measured_cell(f"pysource {words}", plan), memory_forecast(gpt, Plan.parse(plan))
    held = [one["held"] for one in measured]
    states = {name: getattr(found.states, name) for name in ("parameters", "gradients", "optimizer")}
    assert states in held and sum(states.values()) == max(sum(one.values()) for one in held)
    most = max(one["peak"] for one in measured)
    assert found.least * (1 - EXACT) <= most <= found.peak


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        *((task, "shard=2") for task in (*ALSO_SHARDED, unusual.Tied, unusual.Common, unusual.Repeated)),
        *((task, "") for task in (unusual.Ragged, *ALSO_SHARDED)),
        (unusual.Tied, "offload=cpu"),
        (unusual.LargeOutput, "replicate=2"),
        *((unusual.Compared, plan) for plan in ("", "replicate=2,microbatches=2", "shard=2")),
        *((unusual.Normed, f"{axis}=2,batchnorm=sync") for axis in ("replicate", "shard")),  # of the global batch
    ],
)
def test_the_peak_of_what_is_harder_to_trace(task: type, plan: str) -> None:
    found = memory_forecast(FakeModel(task(), Path("data"), kernels=Kernels()), Plan.parse(plan))
    measured = measured_cell(f"{TASKS}:{task.__name__}", plan)
    most = max(one["peak"] for one in measured)
    assert found.least * (1 - CLOSE) <= most <= found.peak * (1 + CLOSE)


@pytest.mark.parametrize("plan", ["domain=2", "domain=2,shard=2,recompute"])
def test_the_peak_of_parts_of_volumes(plan: str) -> None:
    task = Volumes(size=16, batch_size=4, volumes=8)
    found = memory_forecast(FakeModel(task, Path("data"), kernels=Kernels()), Plan.parse(plan))
    most = max(one["peak"] for one in measured_cell("volumes size=16 batch_size=4 volumes=8", plan))
    assert found.least * (1 - CLOSE) <= most <= found.peak * (1 + CLOSE)


def test_the_peak_of_shards_of_a_stage_with_tied_units_is_not_known() -> None:
    fake_model = FakeModel(unusual.Neighbours(), Path("data"), kernels=Kernels())
    assert memory_forecast(fake_model, Plan.parse("pipeline=2,microbatches=2")).peak is not None
    assert memory_forecast(fake_model, Plan.parse("pipeline=2,microbatches=2,shard=2")).peak is None


def test_a_pipeline_keeps_no_buffers_of_batches_of_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for steps in (1, 6):
        monkeypatch.setattr(foresee, "STEPS", steps)
        cell = measured_cell(f"{TASKS}:Lengths", "pipeline=2,microbatches=2")
        peaks.append(max(one["peak"] for one in cell))
    assert peaks[1] < peaks[0] * 1.2  # lengths are 89 to 96
