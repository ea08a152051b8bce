"""Plain PyTorch: the loop as a person writes it, and with DistributedDataParallel on several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import tiny
from benchmarks.pacer import Pacer, Seat


def run(seat: Seat, pacer: Pacer) -> None:
    """Steps for ever; the pacer ends it."""
    net = tiny.network().to(seat.device)
    if seat.size > 1:
        rendezvous_folder = f"file://{seat.folder / 'meet'}"
        dist.init_process_group("gloo", init_method=rendezvous_folder, rank=seat.rank, world_size=seat.size)
        net = DistributedDataParallel(net)
    tiny.loop(net, tiny.optimizer(net), torch.Tensor.backward, seat, pacer)
