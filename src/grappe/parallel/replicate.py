"""Replication: DistributedDataParallel over the replicate axis."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grappe.launch.world import World
from grappe.step.loss import NO_ROOTS, PAYLOAD_SIZE, LossReduction, Roots, loss_reduction
from grappe.task import Call

# Renamed in torch 2.13.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


def ddp_arguments(find_unused: bool) -> dict[str, bool]:
    """Returns DDP's arguments, for the native and the Lightning engine alike.

    Args:
        find_unused: look, at each step, for parameters without a gradient; else DDP fails if there are any.
    """
    return {
        "init_sync": False,  # every process has read the same weights
        "gradient_as_bucket_view": True,
        "find_unused_parameters": find_unused,
        _SYNC_BUFFERS: False,  # statistics are each process's own; they are made to agree for evaluation
    }


class SumsCarrier(nn.Module):
    """A model and a parameter whose gradient carries the step's sums; registered last, it is in DDP's first bucket."""

    def __init__(self, model: nn.Module, world: World, call: Call, summed_in: torch.dtype) -> None:
        super().__init__()
        self.model, self._call = model, call
        self.sums = nn.Parameter(torch.zeros(PAYLOAD_SIZE, dtype=summed_in, device=world.device))

    def forward(self, inputs: Any) -> Any:
        return self._call(self.model, inputs)


DryRun = Callable[[Callable[[Any], Any], Roots], None]
"""Called with the forward to use and further roots with their gradients; leaves gradients, and nothing else."""


class Replicas:
    """DDP for a model, made at the first step, when it is known whether every parameter gets a gradient.

    DDP fails at its second step if a parameter gets no gradient, unless DDP looks for such parameters at every step,
    which costs a walk through the graph and an extra reduction. See docs/decisions/step.md.
    """

    def __init__(self, model: nn.Module, world: World, call: Call, summed_in: torch.dtype = torch.float32) -> None:
        self._carrier, self._call = SumsCarrier(model, world, call, summed_in), call
        self._world = world
        self._wrapped: DistributedDataParallel | None = None

    def wrap(self, dry_run: DryRun) -> LossReduction:
        """Wraps the model in DDP, with a dry run of a step before and another one after. Collective.

        DDP rebuilds its buckets once it has seen the order of the gradients. Sums of three or more
        processes' gradients then have other bits; after a dry run they are the same from the first step on, in a
        resumed training as in an uninterrupted one.

        Returns:
            The loss reduction: by DDP itself, unless DDP looks for unused parameters and would find one more.
        """
        model, carried = self._carrier.model, self._carrier.sums
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        dry_run(functools.partial(self._call, model), NO_ROOTS)
        missing = torch.tensor(float(any(parameter.grad is None for parameter in trained)))
        missing = missing.to(self._world.device)
        dist.all_reduce(missing, group=self._world.gradient_group)
        _forget(trained)
        self._wrapped = wrap(self._carrier, self._world, find_unused=bool(missing))
        if missing:
            return loss_reduction(self._world, summed_in=carried.dtype)
        reduction = loss_reduction(self._world, carried)
        dry_run(self, reduction.start(reduction.zero, 0.0))
        _forget([*trained, carried])
        return reduction

    def __call__(self, inputs: Any) -> Any:
        assert self._wrapped is not None
        return self._wrapped(inputs)

    def reduce_in_next_backward(self, last: bool) -> None:
        """Sets whether the next backward reduces gradients, as the backward of a step's last microbatch does."""
        assert self._wrapped is not None
        self._wrapped.require_backward_grad_sync = last


def wrap(model: nn.Module, world: World, *, find_unused: bool = False) -> DistributedDataParallel:
    """Wraps `model`, which has the same weights on all processes, in DDP over those whose gradients are summed."""
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.gradient_group,
        **ddp_arguments(find_unused),  # pyrefly: ignore
    )


def _forget(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
