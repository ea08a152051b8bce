"""Data sheets of GPUs are read, and sites' GPUs have one."""

import pytest

from grappe import sites
from grappe.foresight.devices import LEAST, OF_BANDWIDTH, OF_PEAK, device_named, devices
from grappe.foresight.trace import Operator

WITHOUT = {"A100, 64 GB", "H100, 64 GB", "H100, 94 GB"}
"""Kinds of A100 and H100 that one site has, of which no data sheet was read."""


def test_each_sites_gpu_has_a_data_sheet_or_is_known_to_have_none() -> None:
    named = {found.node.gpu for found in map(sites.find, sites.files()) if found.node and found.node.gpu}
    assert {name for name in named if device_named(name) is None} == WITHOUT


def test_generations_and_memory_are_those_that_the_sites_say() -> None:
    for site in map(sites.find, sites.files()):
        device = device_named(site.node.gpu) if site.node and site.node.gpu else None
        if site.node and device is not None:
            assert site.node.capability is None or device.generation.endswith(f", {site.node.capability}")
            assert any(size in site.node.gpu for size in device.memory_gb.split(" or ")) or site.node.gpu == "H100"


def test_each_data_sheet_says_its_source_and_belongs_to_a_name() -> None:
    names = [name for device in devices() for name in device.names]
    assert len(names) == len(set(names)) > 5
    reported = [name for device in devices() for name in device.reported]
    assert len(reported) == len(set(reported)) >= len(devices())
    assert all("data sheet" in one.source and one.watts > 100 and one.tflops["fp32"] > 10 for one in devices())


def test_a_kernel_takes_what_bounds_it() -> None:
    v100 = device_named("V100, 16 GB")
    moving = Operator("aten.relu.default", 0, flops=0, moved=2**31, view=False, message=2**30)
    assert v100.kernel(moving, "fp32") == pytest.approx(2**31 / (900e9 * OF_BANDWIDTH))
    computing = moving._replace(flops=10**15)
    assert v100.kernel(computing, "fp32") == pytest.approx(1e15 / (15.7e12 * OF_PEAK))
    assert v100.kernel(computing, "fp16") < v100.kernel(computing, "fp32") / 5
    tiny = moving._replace(moved=0)
    assert v100.kernel(tiny, "fp32") == LEAST
