"""Replication: DistributedDataParallel over the replicate axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grappe.launch.world import World
from grappe.step.loss import NO_ROOTS, PAYLOAD_SIZE, LossReduction, Roots, Sums
from grappe.task import Call

# Renamed in torch 2.13.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


def ddp_arguments(*, find_unused: bool) -> dict[str, bool]:
    """Returns DDP's arguments, for the native and the Lightning engine alike.

    Args:
        find_unused: whether DDP itself looks, at each step, for parameters without a gradient.
    """
    return {
        "init_sync": False,  # every process has read the same weights
        "gradient_as_bucket_view": True,
        "find_unused_parameters": find_unused,
        _SYNC_BUFFERS: False,  # statistics are each process's own; they are made to agree for evaluation
    }


class SumsCarrier(nn.Module):
    """A model and a parameter whose gradient carries the step's notes, see DDPReduction."""

    def __init__(self, model: nn.Module, world: World, call: Call, trained: int, summed_in: torch.dtype) -> None:
        super().__init__()
        self.model, self._call = model, call
        self.notes = nn.Parameter(torch.zeros(PAYLOAD_SIZE + trained, dtype=summed_in, device=world.device))

    def forward(self, inputs: Any) -> Any:
        return self._call(self.model, inputs)


class DDPReduction(LossReduction):
    """Reduction of the loss, the flag and which parameters are reached, within DDP's own.

    DDP waits for a gradient of each parameter, unless it walks through each step's graph, which costs time and a
    reduction. A step's samples on this process may not reach a parameter: after the backward it gets a gradient of
    zeros here, in a second backward that also has the notes. Where no process reaches it, the sum is None again, as
    an optimizer decays a parameter whose gradient is zero. See docs/decisions/step.md.

    Args:
        every: whether each parameter's node is called in a step's last backward, as those before may have reached it.
    """

    def __init__(self, notes: nn.Parameter, trained: list[nn.Parameter], processes: int, *, every: bool) -> None:
        super().__init__(notes.device, notes.dtype)
        self._notes, self._trained, self._processes = notes, trained, processes
        self._all_reached = torch.ones(len(trained), dtype=notes.dtype, device=notes.device)
        self._visited = dict.fromkeys(trained if every else ())
        """Parameters whose node each last backward calls, without a gradient at least."""
        self._root: Tensor | None = None

    def start(self, loss: Tensor, flag: float, root: Tensor | None = None) -> Roots:
        self._loss, self._flag, self._root = loss, flag, root
        visited = [parameter for parameter in self._visited if parameter.requires_grad]
        if not visited:
            return NO_ROOTS
        visit = _Visit.apply(*visited)
        return (visit,), (torch.ones_like(visit),)

    def sums(self) -> Sums:
        missing = [parameter for parameter in self._trained if parameter.grad is None]
        reached = self._all_reached
        if missing:
            reached = torch.tensor([parameter.grad is not None for parameter in self._trained]).to(reached)
        self._end([parameter for parameter in missing if not self._called(parameter)], reached)
        self._root = None
        assert self._notes.grad is not None
        total = self._notes.grad * self._processes  # DDP has divided by them
        self._notes.grad = None
        if missing:
            for parameter, count in zip(self._trained, total[PAYLOAD_SIZE:].tolist(), strict=True):
                if not count:
                    parameter.grad = None
        return Sums(total[:PAYLOAD_SIZE], own=(self._loss,))

    def _called(self, parameter: nn.Parameter) -> bool:
        """Returns whether the backward has called a parameter's node without a gradient: DDP bears one call a step."""
        if not parameter.requires_grad or parameter in self._visited:
            return parameter.requires_grad
        self._visited[parameter] = None
        assert self._root is not None
        return parameter in parameters_below(self._root)

    def _end(self, missing: list[nn.Parameter], reached: Tensor) -> None:
        """Gives the notes and the parameters that are missing their gradient."""
        frozen = [parameter for parameter in missing if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        notes = torch.cat((self.payload(self._loss, self._flag), reached))
        torch.autograd.backward((self._notes, *missing), (notes, *map(torch.zeros_like, missing)))
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Visit(torch.autograd.Function):
    """A node before those of all its arguments, to which it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.nothing = (None,) * len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.nothing


def parameters_below(root: Tensor) -> set[Tensor]:
    """Parameters whose node a backward from `root` calls."""
    nodes = [root.grad_fn]
    seen, reached = set(nodes), set[Tensor]()
    while nodes:
        node = nodes.pop()
        for below, _ in node.next_functions if node is not None else ():
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
                if hasattr(below, "variable"):
                    reached.add(below.variable)
    return reached


class Replicas:
    """DDP for a model, made at the first step."""

    def __init__(
        self, model: nn.Module, world: World, call: Call, summed_in: torch.dtype = torch.float32, microbatches: int = 1
    ) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._carrier = SumsCarrier(model, world, call, len(self._trained), summed_in)
        self._reduction = DDPReduction(self._carrier.notes, self._trained, world.gradient_size, every=microbatches > 1)
        self._world = world
        self._wrapped: DistributedDataParallel | None = None

    def wrap(self, dry_run: Callable[[Callable[[Any], Any], LossReduction], None]) -> LossReduction:
        """Wraps the model in DDP, with a dry run of a step; returns DDP's reduction of the loss. Collective.

        DDP rebuilds its buckets once it has seen the order of the gradients. Sums of three or more
        processes' gradients then have other bits; after a dry run they are the same from the first step on, in a
        resumed training as in an uninterrupted one.

        Args:
            dry_run: called with the forward and the reduction to use; leaves gradients, and nothing else.
        """
        self._wrapped = wrap(self._carrier, self._world)
        dry_run(self, self._reduction)
        for parameter in self._trained:
            parameter.grad = None
        return self._reduction

    def __call__(self, inputs: Any) -> Any:
        assert self._wrapped is not None
        return self._wrapped(inputs)

    def reduce_in_next_backward(self, last: bool) -> None:
        """Sets whether the next backward reduces gradients, as the backward of a step's last microbatch does."""
        assert self._wrapped is not None
        self._wrapped.require_backward_grad_sync = last


def wrap(model: nn.Module, world: World) -> DistributedDataParallel:
    """Wraps `model`, which has the same weights on all processes, in DDP over those whose gradients are summed."""
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.gradient_group,
        **ddp_arguments(find_unused=False),  # pyrefly: ignore
    )
