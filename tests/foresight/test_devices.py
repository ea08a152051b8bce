"""Data sheets of GPUs are read, and sites' GPUs have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe import sites
from grappe.errors import PlanError
from grappe.foresight.devices import LEAST, OF_BANDWIDTH, OF_PEAK, device_named, devices
from grappe.foresight.fabric import Fabric
from grappe.foresight.gpu_time import gpu_time
from grappe.foresight.recording import Operator, Ref
from grappe.foresight.sketch import Sketch
from grappe.parallel.pipeline.rules import RULES
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource
from tests.foresight.test_sketch import Small

WITHOUT = {"A100, 64 GB"}
"""Leonardo's own kind of A100, of which no data sheet is known."""


def test_each_sites_gpu_has_a_data_sheet_or_is_known_to_have_none() -> None:
    named = {found.node.gpu for found in map(sites.find, sites.files()) if found.node and found.node.gpu}
    assert {name for name in named if device_named(name) is None} == WITHOUT


def test_each_data_sheet_says_its_source_and_belongs_to_a_name() -> None:
    names = [name for one in devices() for name in one.names]
    assert len(names) == len(set(names)) > 5
    assert all(
        "data sheet" in one.source and one.watts > 100 and one.tflops["fp32"] > 10 for one in devices()
    )


def test_a_kernel_takes_what_bounds_it() -> None:
    v100 = device_named("V100, 16 GB")
    assert v100 is not None
    large = Ref(0, (1 << 28,), (1,), 0, "float32")
    moving = Operator("aten.relu.default", (large,), (), (large._replace(storage=1),), 0, 0, False, ())
    assert v100.kernel(moving, "fp32") == pytest.approx(2**31 / (900e9 * OF_BANDWIDTH))
    computing = moving._replace(flops=10**15)
    assert v100.kernel(computing, "fp32") == pytest.approx(1e15 / (15.7e12 * OF_PEAK))
    assert v100.kernel(computing, "fp16") < v100.kernel(computing, "fp32") / 5
    tiny = moving._replace(arguments=(), outputs=())
    assert v100.kernel(tiny, "fp32") == LEAST


def test_a_step_on_a_gpu_is_not_calibrated_and_small_models_leave_it_idle() -> None:
    v100 = device_named("V100, 16 GB")
    assert v100 is not None
    sketch = Sketch(Small(), Path("data"), foreach=True, records=True)
    found = gpu_time(sketch, Plan(), Fabric(device=v100))
    assert not found.calibrated and found.busy is not None
    assert found.busy < 0.5 * found.compute
    several = gpu_time(sketch, Plan.parse("replicate=2"), Fabric(device=v100, node=4))
    assert several.compute <= found.compute
    for text, why in (
        ("replicate=8", "a node has 4"),
        ("precision=bf16", "no units"),
        ("tensor=2", "tensor"),
        ("pipeline=2,shard=2,microbatches=2", "pipeline with shard"),
    ):
        with pytest.raises(PlanError, match=why):
            gpu_time(sketch, Plan.parse(text), Fabric(device=v100, node=4))


@pytest.mark.parametrize("schedule", sorted(RULES))
def test_a_pipeline_of_gpus_is_simulated_pass_by_pass(schedule: str) -> None:
    v100 = device_named("V100, 16 GB")
    assert v100 is not None
    sketch = Sketch(Digits(), Path("data"), foreach=True, records=True)
    alone = gpu_time(sketch, Plan.parse("microbatches=4"), Fabric(device=v100))
    found = gpu_time(
        sketch, Plan.parse(f"pipeline=2,microbatches=4,schedule={schedule}"), Fabric(device=v100, node=4)
    )
    assert found.busy is not None and alone.busy is not None
    assert alone.busy / 2 <= found.busy < alone.busy
    assert found.bubble > 0 and found.communication == 0 and not found.calibrated
    both = gpu_time(
        sketch,
        Plan.parse(f"replicate=2,pipeline=2,microbatches=4,schedule={schedule}"),
        Fabric(device=v100, node=4),
    )
    assert both.communication > 0


def test_modules_that_are_split_over_gpus_wait_for_their_messages() -> None:
    v100 = device_named("V100, 16 GB")
    assert v100 is not None
    task = PySource(width=1024, depth=2, heads=8, batch_size=64, megabytes=0.3)
    sketch = Sketch(task, Path("data"), foreach=True, records=True)
    alone = gpu_time(sketch, Plan(), Fabric(device=v100))
    found = gpu_time(sketch, Plan.parse("tensor=2"), Fabric(device=v100, node=4))
    assert alone.communication == 0 < found.communication
    assert found.busy is not None and alone.busy is not None and found.busy < alone.busy
    with pytest.raises(PlanError, match="tensor with another axis"):
        gpu_time(sketch, Plan.parse("tensor=2,replicate=2"), Fabric(device=v100, node=4))
