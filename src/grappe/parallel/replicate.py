"""Replication: DistributedDataParallel over the replicate axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from grappe.errors import GrappeError
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
    zeros here, in a second backward. Where no process reaches it, the sum is None again, as an optimizer decays a
    parameter whose gradient is zero. See docs/decisions/step.md.

    The notes come last. On a CPU a node made before the forward brings them: autograd runs the newest node that is
    ready. Nodes of a GPU have a queue of their own, and those made by another thread (torch.jit.fork) ages of their
    own: there the second backward brings the notes.

    Args:
        every: whether each parameter's node is called in a step's last backward, as those before may have reached it.
    """

    def __init__(self, notes: nn.Parameter, trained: list[nn.Parameter], processes: int, *, every: bool) -> None:
        super().__init__(notes.device, notes.dtype)
        self._notes, self._trained, self._processes = notes, trained, processes
        self._nothing = torch.zeros_like(notes, requires_grad=False)
        self._all_reached = torch.ones(len(trained), dtype=notes.dtype, device=notes.device)
        self._visited = dict.fromkeys(trained if every else ())
        """Parameters whose node each last backward calls, without a gradient at least."""
        self._missing: list[nn.Parameter] = []
        """Parameters without a gradient when the notes were made."""
        self._root: Tensor | None = None
        self._has_node, self._tried = not notes.is_cuda, False
        self._node: Tensor | None = None
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Makes the notes' node, before a forward."""
        if self._has_node:
            self._node = self._notes.view_as(self._notes)
            self._node.register_hook(self._write)

    def start(self, loss: Tensor, flag: float, root: Tensor | None = None) -> Roots:
        self._loss, self._flag, self._root = loss, flag, root
        roots, gradients = NO_ROOTS if self._node is None else ((self._node,), (self._nothing,))
        if visited := [parameter for parameter in self._visited if parameter.requires_grad]:
            return (*roots, _Visit.apply(*visited)), (*gradients, self.zero)
        return roots, gradients

    def _write(self, _: Tensor | None = None) -> Tensor:
        """Returns the notes: [loss, flag, 1 for each parameter that has a gradient]."""
        self._missing = [parameter for parameter in self._trained if parameter.grad is None]
        reached = self._all_reached
        if self._missing:
            reached = torch.tensor([parameter.grad is not None for parameter in self._trained]).to(reached)
            trained = [parameter for parameter in self._missing if parameter.requires_grad]
            self._hooks = [parameter.register_post_accumulate_grad_hook(self._come_late) for parameter in trained]
        return torch.cat((self.payload(self._loss, self._flag), reached))

    def _come_late(self, parameter: Tensor) -> None:
        """Has later steps do without the node, as a gradient comes after it; refuses that after the first step."""
        if self._tried:
            raise GrappeError(
                "backward gave a parameter its gradient after all others, as it did not in the first step: autograd "
                "runs the nodes of other threads in an order of their own. Run the forward in one thread"
            )
        self._has_node = False

    def sums(self) -> Sums:
        notes = () if self._node is not None else (self._write(),)
        while self._hooks:
            self._hooks.pop().remove()
        missing = [parameter for parameter in self._missing if not self._called(parameter)]
        self._root, self._node, self._tried = None, None, True
        if notes or missing:
            frozen = [parameter for parameter in missing if not parameter.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            roots = (self._notes, *missing) if notes else missing
            torch.autograd.backward(roots, (*notes, *map(torch.zeros_like, missing)))
            for parameter in frozen:
                parameter.requires_grad_(False)
        assert self._notes.grad is not None
        total = self._notes.grad * self._processes  # DDP has divided by them
        self._notes.grad = None
        if self._missing:
            for parameter, count in zip(self._trained, total[PAYLOAD_SIZE:].tolist(), strict=True):
                if not count:
                    parameter.grad = None
        return Sums(total, own=(self._loss,))

    def _called(self, parameter: nn.Parameter) -> bool:
        """Returns whether the backward has called a parameter's node without a gradient: DDP bears one call a step."""
        if not parameter.requires_grad or parameter in self._visited:
            return parameter.requires_grad
        self._visited[parameter] = None
        assert self._root is not None
        return parameter in parameters_below(self._root)


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
        self._wrapped = DistributedDataParallel(
            self._carrier,
            device_ids=[self._world.device] if self._world.device.type == "cuda" else None,
            process_group=self._world.gradient_group,
            **ddp_arguments(find_unused=False),  # pyrefly: ignore
        )
        dry_run(self, self._reduction)
        for parameter in self._trained:
            parameter.grad = None
        return self._reduction

    def __call__(self, inputs: Any) -> Any:
        assert self._wrapped is not None
        self._reduction.begin()
        return self._wrapped(inputs)

    def reduce_in_next_backward(self, last: bool) -> None:
        """Sets whether the next backward reduces gradients, as the backward of a step's last microbatch does."""
        assert self._wrapped is not None
        self._wrapped.require_backward_grad_sync = last
