"""Fake group: a world of several processes in which this one is alone: nothing is sent, and nothing arrives."""

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
    """Context with the world of the first process of a plan's replicate and tensor axes; not inside a training."""
    size = plan.replicate * plan.tensor
    process = ProcessRank(size=size, local_size=size)
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    try:
        mesh = dist.init_device_mesh("cpu", (1, plan.replicate, 1, plan.tensor), mesh_dim_names=AXES)
        yield World(
            process=process,
            device=torch.device("cpu"),
            mesh=mesh,
            data_size=plan.replicate,
            data_group=mesh["replicate"].get_group() if plan.replicate > 1 else None,
        )
    finally:
        dist.destroy_process_group()
        forget_meshes()
