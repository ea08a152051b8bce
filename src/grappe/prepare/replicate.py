"""Replication: DistributedDataParallel over the replicate axis."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grappe.plan import Plan
from grappe.prepare.tally import RIDER_SIZE
from grappe.world import World


# Renamed in torch 2.13.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


class Carrier(nn.Module):
    """A model and, last so that it falls into the first bucket, the rider of its gradient reduction."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.rider = nn.Parameter(torch.zeros(RIDER_SIZE, device=device))

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)


def replicate(carrier: Carrier, plan: Plan, world: World) -> DistributedDataParallel:
    """Wraps the model so that backward averages gradients over the processes. Collective."""
    return DistributedDataParallel(
        carrier,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.data_group,
        init_sync=False,  # every process has read the same weights
        gradient_as_bucket_view=True,
        # Statistics are each process's own; they are made to agree for evaluation.
        **{_SYNC_BUFFERS: False},
    )
