"""Memory of a model with offload: sharded parameters on the host, all else on the device.

The meta device stands in for the GPU, as this machine has none: no value is computed there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.parallel.materialise import give_memory
from grappe.parallel.shard import shard
from grappe.plan import Plan
from tests.parallel.test_shard import Scaled
from tests.processes import Pool


def placed(process: ProcessRank, rendezvous_folder: Path) -> dict[str, tuple[str, bool]]:
    """Returns, by name, the device of each tensor, and whether it is sharded."""
    world = join(plan := Plan.parse("offload=cpu,device=cpu"), process, rendezvous_folder)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled(), nn.Linear(4, 4, bias=False))
        model[3].weight = model[0].weight
    shard(model, [], plan, world)
    give_memory(model, torch.device("meta"), offloaded=True)
    assert model[3].weight is model[0].weight
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    world.leave()
    return {name: (tensor.device.type, isinstance(tensor, DTensor)) for name, tensor in found.items()}


def test_offloaded_parameters_have_their_memory_on_the_host(pool: Pool) -> None:
    [found] = pool.run("tests.parallel.test_materialise:placed", 1)
    sharded = {name for name, (_, is_sharded) in found.items() if is_sharded}
    assert sharded == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {found[name][0] for name in sharded} == {"cpu"}
    assert {found[name][0] for name in found.keys() - sharded} == {"meta"}
    assert {"1.running_mean", "1.num_batches_tracked", "2.scale"} <= found.keys() - sharded


def test_fsdp_keeps_the_device_that_a_parameter_was_made_on(pool: Pool) -> None:
    """Tests why: a parameter whose part is replaced by one on the host says the other device, and is refused."""
    assert pool.run("tests.parallel.test_materialise:replaced", 1) == [("meta", "cpu")]


def replaced(process: ProcessRank, rendezvous_folder: Path) -> tuple[str, str]:
    """Returns a sharded parameter's device, and its part's, after the part was replaced as FSDP2 does it."""
    world = join(plan := Plan.parse("offload=cpu,device=cpu"), process, rendezvous_folder)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    shard(model, [], plan, world)
    parameter = model.weight
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = torch.empty(4, 4)
    world.leave()
    return parameter.device.type, parameter._local_tensor.device.type
