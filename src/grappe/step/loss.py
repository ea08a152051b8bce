"""The loss of a step: calls the task's loss for each microbatch, makes backward's start, and sums over the processes.

Shapes: values [B, ...], one for each example or token; weights and output_gradient the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.data.batch import Batch, Microbatch, flat
from grappe.launch.world import World
from grappe.profiling.phases import BACKWARD
from grappe.step.loss_contract import NO_NAMES, LossValues, check_independent_samples, checked_values
from grappe.step.observers import Observers
from grappe.task import Task

PAYLOAD_SIZE = 2  # the loss's sum and the flag
Roots = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
NO_ROOTS: Roots = ((), ())


class Loss(NamedTuple):
    """The loss of one microbatch."""

    values: Tensor
    output_gradient: Tensor
    """The gradient of the global batch's mean loss with respect to `values`, from which backward starts."""
    total: Tensor
    """The sum of the microbatch's losses, a scalar without a gradient: float32, or float64 with precision=fp64."""

    def scalar(self) -> Tensor:
        """Returns a scalar whose gradient with respect to `values` is `output_gradient`; its value has no meaning."""
        kind = self.total.dtype
        return (self.values.to(kind) * self.output_gradient.to(kind)).sum()


class ScoredLoss(NamedTuple):
    """The loss of an evaluated microbatch."""

    total: Tensor
    """The sum of its losses, a scalar."""
    count: Tensor | float
    """The sum of their weights; without weights the number of samples."""
    named: Mapping[str, Tensor]
    """The sums of its named losses."""
    counts: Mapping[str, Tensor] = {}
    """The sums of their weights, where each has its own."""


class Losses:
    """Computes losses of microbatches, divided by the count of the global batch."""

    def __init__(self, task: Task, observers: Observers | None = None, summed_in: torch.dtype = torch.float32) -> None:
        self._task, self._observers, self._summed_in = task, observers or Observers(), summed_in
        self._checked: tuple[object, ...] | None = None
        """Shape, type and rows of the last single loss that fulfilled the contract, which need no further check."""
        self._start: tuple[object, Tensor] | None = None
        self._independence_checked = False

    def __call__(self, output: object, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        """Computes the loss of a training microbatch of `batch`.

        Args:
            scale: factor of the output gradient: the loss scale, or a later divisor of the gradients.

        Raises:
            TaskError: the loss is a mean, or not one value per example or token.
        """
        observers = self._observers
        values, named = self.values(output, micro)
        if named or observers.output is not None:
            observers.after_loss(output, micro, self._totals(named, micro))
        observers.phase(BACKWARD)
        start = self._output_gradient(values, micro, batch, scale)
        return Loss(values, start, self.total(values, micro))

    def dry_run(self, output: object, micro: Microbatch, batch: Batch) -> Loss:
        """Computes the loss of a microbatch that no step learns from, so no observer sees it."""
        values, _ = self.values(output, micro)
        return Loss(values, self._output_gradient(values, micro, batch, 1.0), self.total(values, micro))

    def scored(self, output: Any, micro: Microbatch, batch: Batch) -> list[ScoredLoss]:
        """Returns the sums of an evaluated microbatch; nothing without a sample.

        Raises:
            TaskError: the first microbatch's losses depend on each other.
        """
        if not micro.rows:
            return []
        values, named = loss_values = self.values(output, micro)
        if not self._independence_checked:
            check_independent_samples(self._task, output, micro, loss_values)
            self._independence_checked = True
        total, weights, size = self.total(values, micro), micro.weights, float(micro.size)
        totals = self._totals(named, micro)
        if isinstance(weights, Mapping):
            return [ScoredLoss(total, size, totals, {name: each.sum() for name, each in weights.items()})]
        return [ScoredLoss(total, size if weights is None else weights.sum(), totals)]

    def values(self, output: object, micro: Microbatch) -> LossValues:
        """Calls `task.loss`; checks its contract for the first microbatch of each shape.

        Raises:
            TaskError: the loss is a mean, or not one value per example or token.
        """
        loss: Any = self._task.loss(output, micro.targets)
        if loss.__class__ is not Tensor or micro.weights is not None:
            return checked_values(self._task, loss, micro.size, micro.weights)
        shape = (loss.shape, loss.dtype, micro.rows, micro.padding)
        if shape != self._checked:
            checked_values(self._task, loss, micro.size, None)
            self._checked = shape
        return LossValues(loss, NO_NAMES)

    def _output_gradient(self, values: Tensor, micro: Microbatch, batch: Batch, scale: float) -> Tensor:
        """Computes the gradient of (sum of losses / global count) x `scale` with respect to `values`."""
        if micro.weights is not None:
            return (_flat(micro.weights) * (scale / batch.count)).to(values.dtype)
        key = (values.shape, values.dtype, batch.count, scale, micro.rows, micro.padding)
        if self._start is None or self._start[0] != key:
            assert isinstance(batch.count, float), "a count on the device comes with weights"
            rows = micro.size
            gradient = torch.full_like(
                values, scale / (batch.count * (values.numel() // rows)), memory_format=torch.contiguous_format
            ).detach()
            if micro.padding:
                gradient.view(rows, -1)[micro.rows :] = 0.0
            self._start = (key, gradient)
        return self._start[1]

    def _totals(self, named: Mapping[str, Tensor], micro: Microbatch) -> Mapping[str, Tensor]:
        weights = micro.weights
        if isinstance(weights, Mapping):
            return {name: _weighted_sum(values, weights[name], self._summed_in) for name, values in named.items()}
        return {name: self.total(values, micro) for name, values in named.items()}

    def total(self, values: Tensor, micro: Microbatch) -> Tensor:
        """Sums the microbatch's losses to a scalar."""
        return total_of(values, micro, self._summed_in)


def total_of(values: Tensor, micro: Microbatch, summed_in: torch.dtype) -> Tensor:
    """Sums a microbatch's losses to a scalar; without weights, a row counts as the mean of its values."""
    if micro.weights is not None:
        return _weighted_sum(values, _flat(micro.weights), summed_in)
    values = values.detach()
    if micro.padding:
        values = values.reshape(micro.rows + micro.padding, -1)[: micro.rows]
    total = values.sum(dtype=summed_in)
    per_row = values.numel() // max(1, micro.rows)
    return total / per_row if per_row > 1 else total


def _weighted_sum(values: Tensor, weights: Tensor, summed_in: torch.dtype) -> Tensor:
    return (values.detach().to(summed_in) * weights).sum()


def _flat(weights: Tensor | Mapping[str, Tensor]) -> Tensor:
    return flat(weights) if isinstance(weights, Mapping) else weights


# ---- The sum of a step's losses, and the stop flag, over all processes -------------------------------------


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

    def __init__(self, device: torch.device, summed_in: torch.dtype) -> None:
        self._loss = torch.zeros((), dtype=summed_in, device=device)
        self._flag = 0.0
        self._flags = {0.0: torch.zeros_like(self._loss)}
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
        super().__init__(carried.device, carried.dtype)
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

    def __init__(self, world: World, summed_in: torch.dtype) -> None:
        super().__init__(world.device, summed_in)
        # Over the whole world, since a flag may be raised anywhere; tensor peers have the same loss.
        self._copies = world.size // world.data_size
        self._work: dist.Work | None = None

    def start(self, loss: Tensor, flag: float) -> Roots:
        self._payload = self.payload(loss / self._copies, flag)
        self._work = dist.all_reduce(self._payload, async_op=True)
        return NO_ROOTS

    def sums(self) -> Sums:
        return Sums(self._payload, self._work)


def loss_reduction(
    world: World, carried: nn.Parameter | None = None, summed_in: torch.dtype = torch.float32
) -> LossReduction:
    """Chooses the loss reduction for `world`'s processes.

    Args:
        carried: a parameter of PAYLOAD_SIZE numbers whose gradient DDP averages over the data slices, if there is one.
    """
    if carried is not None:
        return PiggybackReduction(carried, world.data_size)
    return AllReduceReduction(world, summed_in) if world.size > 1 else LossReduction(world.device, summed_in)


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
