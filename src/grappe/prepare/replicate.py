"""Replication: DistributedDataParallel over the replicate axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grappe.prepare.tally import NO_ROOTS, RIDER_SIZE, ReduceTally, RiderTally, Roots, Tally
from grappe.world import World

# Renamed in torch 2.13.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


def ddp_arguments(find_unused: bool) -> dict[str, bool]:
    """What DDP is told wherever it is made.

    Args:
        find_unused: look, at each step, for parameters that get no gradient; DDP fails where there are any else.
    """
    return {
        "init_sync": False,  # every process has read the same weights
        "gradient_as_bucket_view": True,
        "find_unused_parameters": find_unused,
        _SYNC_BUFFERS: False,  # statistics are each process's own; they are made to agree for evaluation
    }


class Carrier(nn.Module):
    """A model and, last so that it falls into the first bucket, the rider of its gradient reduction."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.rider = nn.Parameter(torch.zeros(RIDER_SIZE, device=device))

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)


Rehearse = Callable[[Callable[[Any], Any], Roots], None]
"""Called with the forward to use and further roots with their gradients; leaves gradients, and nothing else."""


class Replicas:
    """DDP around a carrier, made at the first step, when it is known whether every parameter gets a gradient.

    DDP fails at its second step where one gets none, unless it is told to look for such at every step, which
    costs a walk through the graph and a reduction of its own.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.carrier = Carrier(model, world.device)
        self._world = world
        self._wrapped: DistributedDataParallel | None = None

    def begin(self, rehearse: Rehearse) -> Tally:
        """Rehearses a step on the bare model, wraps it, and rehearses once more. Collective.

        DDP puts gradients into other buckets once it has seen in which order they come. Sums of three or more
        processes' gradients then have other bits; after a rehearsal they are the same from the first step on,
        in a training that goes on as in one that never stopped.

        Returns:
            What sums the loss: the rider, unless DDP looks for unused parameters and would count it among them.
        """
        trained = [parameter for parameter in self.carrier.model.parameters() if parameter.requires_grad]
        rehearse(self.carrier.model, NO_ROOTS)
        missing = torch.tensor(float(any(parameter.grad is None for parameter in trained)))
        missing = missing.to(self._world.device)
        dist.all_reduce(missing, group=self._world.data_group)
        _forget(trained)
        self._wrapped = wrap(self.carrier, self._world, find_unused=bool(missing))
        if missing:
            return ReduceTally(self._world)
        tally = RiderTally(self.carrier.rider, self._world.data_size)
        rehearse(self._wrapped, tally.roots(tally.zero, 0.0))
        _forget([*trained, self.carrier.rider])
        return tally

    def __call__(self, inputs: Any) -> Any:
        assert self._wrapped is not None
        return self._wrapped(inputs)

    def synchronise(self, last: bool) -> None:
        """Whether the next backward is to reduce."""
        assert self._wrapped is not None
        self._wrapped.require_backward_grad_sync = last


def wrap(model: nn.Module, world: World, *, find_unused: bool = False) -> DistributedDataParallel:
    """`model`, which has the same weights everywhere, in DDP over the processes with slices of their own."""
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.data_group,
        **ddp_arguments(find_unused),  # pyrefly: ignore
    )


def _forget(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
