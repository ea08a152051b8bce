"""Pretended: a world of several processes in which this one is alone: nothing is sent, and nothing arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from grappe.launch.rank import ProcessRank
from grappe.launch.world import AXES, World
from grappe.plan import Plan
from grappe.private_api.torch import fake_store, forget_meshes


def possible() -> bool:
    """Returns whether a world can be pretended: this process is in no training."""
    return not dist.is_initialized()


@contextlib.contextmanager
def pretended(plan: Plan) -> Iterator[World]:
    """Context with the world of the first process of a plan's tensor axis; not inside a training."""
    process = ProcessRank(size=plan.tensor, local_size=plan.tensor)
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=plan.tensor)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1, 1, plan.tensor), mesh_dim_names=AXES)
        yield World(process=process, device=torch.device("cpu"), mesh=mesh)
    finally:
        dist.destroy_process_group()
        forget_meshes()
