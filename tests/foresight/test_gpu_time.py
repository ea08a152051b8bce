"""Steps on GPUs: operators by roofline, messages by the slowest link, pipelines pass by pass."""

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from benchmarks.views_task import Views

from grappe import sites
from grappe.errors import PlanError
from grappe.foresight.devices import LEAST, OF_BANDWIDTH, device_named
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.gpu_time import NETWORK_LEAST, OF_NETWORK, Fabric, gpu_time, pass_means, update_operators
from grappe.foresight.partition import traced_passes
from grappe.foresight.pipeline_trace import orders_of
from grappe.foresight.trace import LOSS
from grappe.parallel.pipeline.rules import RULES
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource
from tests.foresight.test_fake_model import Small

A100, V100 = device_named("A100, 40 GB"), device_named("V100, 16 GB")
LINK = A100.link_gb * 1e9 * OF_BANDWIDTH
NETWORK = 100e9 / 8 * OF_NETWORK
NARVAL = Fabric(device=A100, node=4, network_gbit=100)


@pytest.mark.parametrize(
    ("degree", "stride", "rate"),
    [
        (4, 1, LINK),
        (2, 2, LINK),
        (8, 1, NETWORK),  # one ring over all GPUs
        (4, 2, NETWORK / 2),  # two groups leave each node
        (2, 4, NETWORK / 4),  # each GPU's group has one member a node
        (2, 16, NETWORK / 4),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(degree: int, stride: int, rate: float) -> None:
    assert NARVAL.all_reduce(1e9, degree, stride) == pytest.approx(2 * (degree - 1) / degree * 1e9 / rate)
    least = LEAST if rate == LINK else NETWORK_LEAST
    assert NARVAL.message(1e6, degree, stride) == pytest.approx(least + 1e6 / rate)


def test_networks_count_where_they_are_needed_and_known() -> None:
    assert NARVAL.all_reduce(1e9, 1) == 0
    fast = dataclasses.replace(NARVAL, network_gbit=1e5)
    assert fast.all_reduce(1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / LINK)
    unknown = dataclasses.replace(NARVAL, network_gbit=None)
    fake_model = FakeModel(Small(), Path("data"), foreach=True, records=True)
    assert gpu_time(fake_model, Plan(replicate=4), unknown).compute
    with pytest.raises(PlanError, match="8 GPUs, and a node has 4: the rate of the network between nodes is not known"):
        gpu_time(fake_model, Plan(replicate=8), unknown)
    rates = {name: found.node.network_gbit for name in sites.files() if (found := sites.find(name)).node}
    assert (rates["narval"], rates["tamia"], rates["killarney"]) == (100, 800, 100)


def test_shards_within_nodes_send_less_between_them_than_shards_over_nodes() -> None:
    """Of 32 GPUs: ZeRO over all of them, replicas of shards of a node, and replicas."""
    fake_model = FakeModel(Small(), Path("data"), foreach=True, records=True)
    slow = dataclasses.replace(NARVAL, network_gbit=1e-3)  # so that messages are all that counts
    over, within, whole = (
        gpu_time(fake_model, Plan.parse(text), slow).communication
        for text in ("shard=32", "replicate=8,shard=4", "replicate=32")
    )
    assert within == pytest.approx(whole * (7 / 8) / (31 / 32), rel=0.05)
    assert over == pytest.approx(1.5 * whole, rel=0.05)  # gathered twice, reduced once


def test_a_step_on_a_gpu_is_not_measured_and_small_models_leave_it_idle() -> None:
    fake_model = FakeModel(Small(), Path("data"), foreach=True, records=True)
    found = gpu_time(fake_model, Plan(), Fabric(device=V100))
    assert not found.measured and found.gpu_share() < 0.1
    assert found.gpu_share(found.compute / 2) == pytest.approx(2 * found.gpu_share())
    several = gpu_time(fake_model, Plan.parse("replicate=2"), Fabric(device=V100, node=4))
    assert several.compute <= found.compute
    for text, why in (
        ("replicate=8", "a node has 4"),
        ("precision=bf16", "no units"),
        ("tensor=2", "tensor"),
        ("pipeline=2,shard=2,microbatches=2", "pipeline with shard"),
    ):
        with pytest.raises(PlanError, match=why):
            gpu_time(fake_model, Plan.parse(text), Fabric(device=V100, node=4))


@pytest.mark.parametrize("schedule", sorted(RULES))
def test_a_pipeline_of_gpus_is_simulated_pass_by_pass(schedule: str) -> None:
    fake_model = FakeModel(Digits(), Path("data"), foreach=True, records=True)
    alone = gpu_time(fake_model, Plan.parse("microbatches=4"), Fabric(device=V100))
    plan, fabric = f"pipeline=2,microbatches=4,schedule={schedule}", Fabric(device=V100, node=4)
    found = gpu_time(fake_model, Plan.parse(plan), fabric)
    assert max(alone.at_peak) / 2 <= max(found.at_peak) < max(alone.at_peak)
    assert found.bubble > 0 and found.communication == 0 and not found.measured
    assert gpu_time(fake_model, Plan.parse(f"replicate=2,{plan}"), fabric).communication > 0


def test_modules_that_are_split_over_gpus_wait_for_their_messages() -> None:
    task = PySource(width=1024, depth=2, heads=8, batch_size=64, megabytes=0.3)
    fake_model = FakeModel(task, Path("data"), foreach=True, records=True)
    alone = gpu_time(fake_model, Plan(), Fabric(device=V100))
    found = gpu_time(fake_model, Plan.parse("tensor=2"), Fabric(device=V100, node=4))
    assert alone.communication == 0 < found.communication
    assert found.at_peak is not None and alone.at_peak is not None and max(found.at_peak) < max(alone.at_peak)
    with pytest.raises(PlanError, match="tensor with another axis"):
        gpu_time(fake_model, Plan.parse("tensor=2,replicate=2"), Fabric(device=V100, node=4))


def test_the_update_is_recorded_on_the_shapes_of_a_part() -> None:
    fake_model = FakeModel(Small(), Path("data"))
    full = update_operators(fake_model.task, fake_model.mode, [("a", (8, 8), torch.float32)])
    half = update_operators(fake_model.task, fake_model.mode, [("a", (4, 8), torch.float32)])
    assert len(full) == len(half) >= 2
    assert max(one.moved for one in full) == 2 * max(one.moved for one in half)
    assert update_operators(fake_model.task, fake_model.mode, []) == []


def test_a_clipped_gradient_is_measured_and_scaled_before_the_update() -> None:
    fake_model, named = FakeModel(Small(), Path("data")), [("a", (8, 8), torch.float32)]
    plain, clipped = (
        [one.name for one in update_operators(task, fake_model.mode, named)]
        for task in (fake_model.task, dataclasses.replace(fake_model.task, clip=1.0))
    )
    assert clipped[-len(plain) :] == plain
    assert any("norm" in name for name in clipped[: -len(plain)])


@pytest.mark.parametrize("schedule", sorted(RULES))
def test_the_passes_of_a_pipeline_run_a_microbatchs_operators(schedule: str) -> None:
    fake_model = FakeModel(Digits(), Path("data"), records=True)
    plan = Plan.parse(f"pipeline=2,microbatches=4,schedule={schedule}")
    passes = orders_of(plan), traced_passes(fake_model, plan, 64)
    means = pass_means(*passes, lambda one: one.flops)
    trace = fake_model.trace(16)
    loss = next(number for number, mark in enumerate(trace.marks) if mark.kind == LOSS)
    found: dict[str, float] = defaultdict(float)
    for (kind, _), flops in means.items():
        found["forward" if kind == "forward" else "backward"] += flops
    assert found == {
        "forward": sum(one.flops for one in trace.operators if one.mark <= loss),
        "backward": sum(one.flops for one in trace.operators if one.mark > loss),
    }
    if RULES[schedule].splits_backward:
        # torch leaves the first stage's whole backward to the other half
        assert pass_means(*passes, lambda one: 1)["inputs", 0] == 0
        assert means["weights", 1] > 0 and means["inputs", 1] > 0
    else:
        assert {kind for kind, _ in means} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("task", "plan", "why"),
    [
        (Views(), "pipeline=2,microbatches=2", "loss of the whole batch: its time is not foreseen"),
        (Small(), "pipeline=2,microbatches=2,offload=cpu", "pipeline with offload"),
        (Small(), "offload=cpu", "offload on a GPU"),
        (Small(), "compile", "compile: its time is not foreseen"),
    ],
)
def test_plans_without_a_time_say_why(task: Small | Views, plan: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        gpu_time(FakeModel(task, Path("data"), records=True), Plan.parse(plan), Fabric(device=A100, node=4))


def test_a_pipeline_of_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.parallel.families import Llama

    found = gpu_time(FakeModel(Llama(), tmp_path, records=True), Plan.parse("pipeline=2,microbatches=2"), NARVAL)
    assert found.bubble > 0
