"""Messages within a node take its links' rate, and between nodes the share of the network that their group has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from grappe import sites
from grappe.errors import PlanError
from grappe.foresight.devices import LEAST, OF_BANDWIDTH, device_named
from grappe.foresight.fabric import NETWORK_LEAST, OF_NETWORK, Fabric
from grappe.foresight.gpu_time import gpu_time
from grappe.foresight.sketch import Sketch
from grappe.plan import Plan
from tests.foresight.test_sketch import Small

A100 = device_named("A100, 40 GB")
assert A100 is not None
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


def test_one_process_sends_nothing_and_a_network_is_not_faster_than_links() -> None:
    assert NARVAL.all_reduce(1e9, 1) == 0
    fast = dataclasses.replace(NARVAL, network_gbit=1e5)
    assert fast.all_reduce(1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / LINK)


def test_a_network_that_is_not_known_is_named() -> None:
    unknown = dataclasses.replace(NARVAL, network_gbit=None)
    unknown.refuse_unknown(Plan(replicate=4))
    with pytest.raises(
        PlanError, match="8 GPUs, and a node has 4: the rate of the network between nodes is not known"
    ):
        unknown.refuse_unknown(Plan(replicate=8))


def test_shards_within_nodes_send_less_between_them_than_shards_over_nodes() -> None:
    """Of 32 GPUs: ZeRO over all of them, replicas of shards of a node, and replicas."""
    sketch = Sketch(Small(), Path("data"), foreach=True, records=True)
    slow = dataclasses.replace(NARVAL, network_gbit=1e-3)  # so that messages are all that counts
    over, within, whole = (
        gpu_time(sketch, Plan.parse(text), slow).communication
        for text in ("shard=32", "replicate=8,shard=4", "replicate=32")
    )
    assert within == pytest.approx(whole * (7 / 8) / (31 / 32), rel=0.05)
    assert over == pytest.approx(1.5 * whole, rel=0.05)  # gathered twice, reduced once


def test_sites_say_the_rate_of_a_node_together() -> None:
    rates = {name: found.node.network_gbit for name in sites.files() if (found := sites.find(name)).node}
    assert (rates["narval"], rates["tamia"], rates["killarney"]) == (100, 800, None)
