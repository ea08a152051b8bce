"""Steps of optimizers that call a closure, which computes loss and gradients several times a step: L-BFGS, SAM."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from grappe.checkpoint.weights import InMemory, gathered, read_into
from grappe.data.batch import Batch
from grappe.errors import TaskError
from grappe.launch.world import World
from grappe.private_api.torch import is_dtensor
from grappe.step.clip import sharded_groups
from grappe.step.loss import Sums
from grappe.step.observers import NamedParameters, Observers

Gradients = Callable[[], tuple[Sums, Tensor | None]]
"""Leaves the global batch's gradient on the parameters; returns the step's sums and the gradient's norm."""


def wrapped(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Returns the optimizers whose state a step changes: by "" itself, by attribute those that it wraps, as SAM does.

    A wrapped optimizer that shares its state with the outer one is left out.
    """
    inner = {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}
    return {"": optimizer} | {name: value for name, value in inner.items() if value.state is not optimizer.state}


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether `step` must be given a closure.

    That is so of L-BFGS; of a `step` whose parameter has no default; of an optimizer with `first_step` and
    `second_step`, as SAM's are; and of one that says so itself: `needs_closure = True`.
    """
    declared = getattr(optimizer, "needs_closure", None)
    if declared is not None:
        return bool(declared)
    if isinstance(optimizer, LBFGS) or gradients_first(optimizer):
        return True
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()  # a schedule replaces the method
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return bool(required)


def gradients_first(optimizer: Optimizer) -> bool:
    """Returns whether the gradients are expected before `step(closure)` is called, as SAM's authors call it."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


def step_with_closure(optimizer: Optimizer, compute: Callable[[], float]) -> None:
    """Steps an optimizer; `compute` leaves the gradients on its parameters, and returns the loss."""

    kind = torch.promote_types(optimizer.param_groups[0]["params"][0].dtype, torch.float32)

    @torch.enable_grad()
    def closure() -> Tensor:
        return torch.tensor(compute(), dtype=kind)  # as in a loop by hand: a search along a line compares losses

    if gradients_first(optimizer):
        closure()
    optimizer.step(closure)  # type: ignore[arg-type]


class WholeCopies:
    """Whole copies of sharded parameters, for optimizers that join all parameters to one vector or replace tensors.

    Every process holds all of them, and computes the same update.

    Args:
        peers: the processes of the tensor axis. Each computes the gradients of parameters that are not split over it,
            and on a GPU not always to the same bit: all take those of the first.
    """

    def __init__(self, sharded: NamedParameters, peers: dist.ProcessGroup | None = None) -> None:
        self._sharded, self._peers = sharded, peers
        self.named = [(name, nn.Parameter(gathered(parameter).clone())) for name, parameter in sharded]

    @torch.no_grad()
    def read(self) -> None:
        """Reads the weights from all processes' shards. Collective."""
        for (_, parameter), (_, copy) in zip(self._sharded, self.named, strict=True):
            copy.copy_(gathered(parameter))

    def read_gradients(self) -> None:
        """Reads the gradients from all processes' shards. Collective."""
        for (_, parameter), (_, copy) in zip(self._sharded, self.named, strict=True):
            copy.grad = None
            if (gradient := parameter.grad) is not None:
                copy.grad = joined = gathered(gradient).clone()
                if self._peers is not None and self._peers not in sharded_groups(gradient):
                    dist.broadcast(joined, group=self._peers, group_src=0)

    def write(self) -> None:
        """Writes the weights into this process's shards."""
        weights = InMemory({name: copy.detach() for name, copy in self.named})
        for name, parameter in self._sharded:
            read_into(parameter.detach(), weights, name)


def copies_of(named: NamedParameters, world: World) -> WholeCopies | None:
    """Returns whole copies of the parameters; None if none is sharded."""
    if not any(is_dtensor(parameter) for _, parameter in named):
        return None
    assert world.mesh is not None
    axis = world.mesh["tensor"]
    return WholeCopies(named, axis.get_group() if axis.size() > 1 else None)


class ClosureStep:
    """Takes optimizer steps with a closure. Collective.

    Every process calls the closure equally often: all get the same loss and, bit for bit, the same gradients.

    Args:
        parameters: the parameters on which the gradients are left.
        copies: what the optimizer has in their place.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], observers: Observers, copies: WholeCopies | None
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._observers, self._copies = observers, copies

    def __call__(self, gradients: Gradients, batch: Batch) -> tuple[Sums, Tensor | None]:
        """Takes a step on `batch`; returns the sums and the norm of the closure's first call.

        Raises:
            TaskError: the optimizer has not called the closure.
        """
        copies, observers = self._copies, self._observers
        calls: list[tuple[Sums, Tensor | None]] = []

        def compute() -> float:
            if copies is not None:
                copies.write()
            for parameter in self._parameters:
                parameter.grad = None
            calls.append(gradients())
            observers.muted = True  # training metrics count each sample once
            if copies is not None:
                copies.read_gradients()
            else:
                for parameter in self._parameters:
                    if parameter.grad is not None:  # DDP's own memory, which the next call overwrites
                        parameter.grad = parameter.grad.clone()
            return calls[-1][0].read()[0] / float(batch.count)

        if copies is not None:
            copies.read()
        try:
            step_with_closure(self._optimizer, compute)
        finally:
            observers.muted = False
        if copies is not None:
            copies.write()
        if not calls:
            raise TaskError(
                f"{type(self._optimizer).__name__}.step() has not called its closure, so it had no gradient: if it "
                "takes the gradients as they are, set optimizer.needs_closure = False in optimizer()"
            )
        return calls[0]
