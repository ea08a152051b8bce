"""LossReduction: sums a step's loss and stop flag over all processes, asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.data.batch import Batch
from grappe.launch.world import World

PAYLOAD_SIZE = 2  # the loss's sum and the flag
Roots = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
NO_ROOTS: Roots = ((), ())


class Sums:
    """The global sums of one step, still being computed; `read` waits for the sums."""

    def __init__(self, values: Tensor, work: dist.Work | None = None, flag: float | None = None) -> None:
        if work is not None and values.is_cuda:
            work.wait()  # makes the stream wait, not the host
        self._values: Tensor | HostCopy = HostCopy(values) if values.is_cuda else values
        self._work = work
        self._flag = flag

    def read(self) -> Sequence[float]:
        """Returns [the loss's sum over all processes, the sum of their flags]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        values = self._values.read() if isinstance(self._values, HostCopy) else self._values
        return (values.item(), self._flag) if self._flag is not None else values.tolist()


class LossReduction:
    """The loss reduction of a single process; also the base of the other reductions."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._flag = 0.0
        self._flags = {0.0: torch.zeros((), device=device)}
        self.zero = self._flags[0.0]

    def payload(self, loss: Tensor, flag: float) -> Tensor:
        """Returns [loss, flag] as one tensor, which stays unchanged until it is read."""
        if flag not in self._flags:
            self._flags[flag] = torch.full_like(self.zero, flag)
        return torch.stack((loss, self._flags[flag]))

    def start(self, loss: Tensor, flag: float) -> Roots:
        """Starts the reduction, before the step's last backward.

        Returns:
            Additional roots of that backward, and their gradients, which carry the sums.
        """
        self._loss, self._flag = loss, flag
        return NO_ROOTS

    def sums(self) -> Sums:
        """Returns the step's sums, after the step's last backward has been called."""
        return Sums(self._loss, flag=self._flag)


class PiggybackReduction(LossReduction):
    """Loss reduction within DDP's own reduction: the sums are the gradient of a parameter with no other use."""

    def __init__(self, carried: nn.Parameter, processes: int) -> None:
        super().__init__(carried.device)
        self._carried = carried
        self._as_root = (carried,)  # a leaf's gradient is the one that backward gets for it
        self._processes = processes

    def start(self, loss: Tensor, flag: float) -> Roots:
        return self._as_root, (self.payload(loss, flag),)

    def sums(self) -> Sums:
        assert self._carried.grad is not None
        total = self._carried.grad * self._processes  # DDP has divided by them
        self._carried.grad = None
        return Sums(total)


class AllReduceReduction(LossReduction):
    """Loss reduction by a separate all-reduce, started before backward, so that it usually ends before it is read."""

    def __init__(self, world: World) -> None:
        super().__init__(world.device)
        # Over the whole world, since a flag may be raised anywhere; tensor peers have the same loss.
        self._copies = world.size // world.data_size
        self._work: dist.Work | None = None

    def start(self, loss: Tensor, flag: float) -> Roots:
        self._payload = self.payload(loss / self._copies, flag)
        self._work = dist.all_reduce(self._payload, async_op=True)
        return NO_ROOTS

    def sums(self) -> Sums:
        return Sums(self._payload, self._work)


def loss_reduction(world: World, carried: nn.Parameter | None = None) -> LossReduction:
    """Chooses the loss reduction for `world`'s processes.

    Args:
        carried: a parameter of PAYLOAD_SIZE numbers whose gradient DDP averages over the data slices, if there is one.
    """
    if carried is not None:
        return PiggybackReduction(carried, world.data_size)
    return AllReduceReduction(world) if world.size > 1 else LossReduction(world.device)


class HostCopy:
    """A tensor being copied from a GPU; on a CPU, the tensor itself."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        """Returns the tensor on the CPU; waits for the end of the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def host_copy(leaf: Any) -> Any:
    """Begins to copy a tensor that is changed in place later; returns anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return HostCopy(leaf if leaf.is_cuda else leaf.clone())


def read(leaf: Any) -> Any:
    """Returns the tensor of a HostCopy; anything else as it is."""
    return leaf.read() if isinstance(leaf, HostCopy) else leaf


class StepResult(NamedTuple):
    """The result of one optimizer step; its values may still be being computed."""

    batch: Batch
    sums: Sums
    """The loss's global sum and the processes' flags, still being computed."""
    norm: Tensor | None
    """The whole gradient's norm before clipping, a scalar; None if the step did not need it."""
    skipped: bool
    """Whether an fp16 infinity occurred: nothing was learned, and the schedule did not advance."""
    lr: float
    """The learning rate of the first parameter group in this step."""


After = Callable[[StepResult], bool]
