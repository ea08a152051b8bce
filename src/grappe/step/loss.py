"""The loss of a step: calls the task's loss for each microbatch, checks it, begins backward, sums over the processes.

Shapes: values [B, ...], one for each example or token; weights and output_gradient the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.data.batch import Batch, LossWeights, Microbatch, flat, with_rows
from grappe.domain.batches import uncut
from grappe.domain.parts import Domain
from grappe.errors import PlanError, TaskError
from grappe.errors.user_code import calls_users, method_error
from grappe.errors.user_line import at
from grappe.launch.world import World
from grappe.private_api.torch import tree_flatten, tree_unflatten
from grappe.profiling.phases import BACKWARD
from grappe.rows.tensor import full, own_term
from grappe.step.observers import Observers
from grappe.task import Task

NO_NAMES: Mapping[str, Tensor] = {}
RELATIVE = {torch.float16: 0.05, torch.bfloat16: 0.05}
"""By the loss's type, the difference that rounding may make, relative to the largest value; others: ROUNDING."""
ROUNDING = 1e-3


class LossValues(NamedTuple):
    """The values that a task's `loss` returned for some rows."""

    values: Tensor
    """Losses of the samples: the sum of several losses, or the values of several shapes one after the other."""
    named: Mapping[str, Tensor]
    """Several losses by name; empty if there is one."""

    @property
    def each(self) -> tuple[Tensor, ...]:
        """Returns the values of each loss."""
        return tuple(self.named.values()) or (self.values,)


@calls_users("loss()")
def loss_of(task: Task, output: Any, target: Any) -> LossValues:
    """Calls `task.loss`.

    Raises:
        TaskError: it returned no tensor of decimal numbers, and no dictionary of such tensors.
    """
    loss: Any = task.loss(output, target)
    return read_loss(task, loss)


def values_of(task: Task, output: Any, targets: Any, rows: int, weights: LossWeights) -> LossValues:
    """Calls `task.loss` for `rows` rows, and checks its whole contract.

    Raises:
        TaskError: the loss is a mean, or not one value per example or token.
    """
    loss: Any = task.loss(output, targets)
    return checked_values(task, loss, rows, weights)


def read_loss(task: Task, loss: Any) -> LossValues:
    """Returns the values of what `task.loss` returned.

    Raises:
        TaskError: it is no tensor of decimal numbers, and no dictionary of such tensors.
    """
    if not isinstance(loss, Mapping):
        _check_kind(task, loss)
        return LossValues(loss, NO_NAMES)
    if not loss:
        raise method_error(task, "loss", "returned an empty dictionary: return a tensor for each loss's name")
    for name, values in loss.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise method_error(task, "loss", f"has the name {name!r}: use letters, digits and _, as in 'boxes'")
        _check_kind(task, values, f" for {name!r}")
    several = list(loss.values())
    if len({values.shape for values in several}) > 1:
        return LossValues(flat(loss), dict(loss))
    return LossValues(functools.reduce(torch.add, several), dict(loss))


def _check_kind(task: Task, values: Any, of: str = "") -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.layout != torch.strided:
        kind = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        raise method_error(
            task, "loss", f"returned {kind}{of}: return a tensor of decimal numbers, one for each example"
        )


def checked_values(task: Task, loss: Any, rows: int, weights: LossWeights) -> LossValues:
    """Returns the values of what `task.loss` returned for `rows` rows, and checks them against `counts`.

    Raises:
        TaskError: the loss is a mean, or not one value per example or token.
    """
    loss_values = read_loss(task, loss)
    if any(each.dim() == 0 for each in loss_values.each):
        if not task.whole_batch_loss:
            raise TaskError(
                f"{type(task).__name__}.loss() returned one number, so what it averaged over cannot be known. "
                'Return one value per example: reduction="none", as in '
                'F.cross_entropy(output, target, reduction="none"); or write `whole_batch_loss = True` in the task, '
                "for a mean over all samples of a batch" + at(task, "loss")
            )
        # A mean over the whole batch becomes the value of each of its rows, whose mean it is again.
        means = {name: each if each.dim() else each.expand(rows) for name, each in loss_values.named.items()}
        total = loss_values.values
        loss_values = LossValues(total if total.dim() else total.expand(rows), means)
    values, named = loss_values
    shapes = {name: list(each.shape) for name, each in named.items()}
    if isinstance(weights, Mapping):
        counted = {name: list(each.shape) for name, each in weights.items()}
        if shapes != counted:
            raise TaskError(
                f"{type(task).__name__}: counts() has the shapes {counted}, loss() "
                f"{shapes or 'one loss without a name'}: they must be the same{at(task, 'counts')}"
            )
        return LossValues(flat(named, weights), named)
    if any(each.shape != values.shape for each in named.values()):
        raise TaskError(
            f"{type(task).__name__}.loss() has losses of different shapes, {shapes}: give each one value for each "
            "example, or define counts() to state what the values of each count: a dictionary by the same names"
            + at(task, "loss")
        )
    if weights is None and (values.numel() % rows or values.numel() == 0):
        raise TaskError(
            f"{type(task).__name__}.loss() returned {list(values.shape)} for {rows} rows: return one "
            'value per example or per token (reduction="none"), or define counts() to state what each value counts'
            + at(task, "loss")
        )
    if weights is not None and weights.shape != values.shape:
        raise TaskError(
            f"{type(task).__name__}: counts() has shape {list(weights.shape)}, loss() "
            f"{list(values.shape)}: they must be the same{at(task, 'counts')}"
        )
    return loss_values


# ---- A sample's loss depends on that sample's output alone, so that a batch can be cut anywhere -------------


@torch.no_grad()
def check_independent_samples(task: Task, output: Any, micro: Microbatch, loss_values: LossValues) -> None:
    """Computes the loss of each half of the rows alone, and compares it with `loss_values` of all rows.

    Nothing is checked where outputs, targets or values have no row for each sample (a batch of graphs), or where the
    loss draws random numbers.

    Raises:
        TaskError: the values differ, so that under another plan the task would learn something else.
    """
    half = micro.rows // 2
    if micro.padding or not half:
        return
    leaves, nesting = tree_flatten((output, micro.targets))
    if any(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != micro.rows for leaf in leaves):
        return
    devices = [loss_values.values.device] if loss_values.values.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        again = loss_of(task, output, micro.targets)
        if not all(torch.equal(a, b) for a, b in zip(again.each, loss_values.each, strict=True)):
            return  # the loss draws random numbers of its own
    for rows in (slice(0, half), slice(half, micro.rows)):
        some = [leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
        part, targets = tree_unflatten(some, nesting)
        try:
            with with_rows(rows):
                of_part = loss_of(task, part, targets)
        except Exception:
            return
        for values, some_values in zip(loss_values.each, of_part.each, strict=True):
            if loss_values.named and len(values) != micro.rows:
                continue  # one of several losses may have values for boxes, in any order
            _check_same_values(task, values, some_values, micro.rows, rows)


def _check_same_values(task: Task, values: Tensor, some: Tensor, count: int, rows: slice) -> None:
    """Raises TaskError where a loss's values for `rows` differ from those that the whole batch had there."""
    if not values.numel() or values.numel() % count:
        return
    own = rows.stop - rows.start
    if values.shape[:2] == (count, count) and some.shape[:2] == (own, own):
        raise TaskError(
            f"{type(task).__name__}.loss() has a value for each pair of samples, {list(values.shape)} for {count} "
            "samples: an output [B, 1] meets a target [B], say. Give both one shape: output.squeeze(1), or "
            "target.unsqueeze(1)" + at(task, "loss")
        )
    expected = values.reshape(count, -1)[rows].float()
    if some.numel() != expected.numel():
        return
    gap = (some.reshape(own, -1).float() - expected).abs().max()
    if gap > RELATIVE.get(values.dtype, ROUNDING) * expected.abs().max():
        raise TaskError(
            f"{type(task).__name__}.loss() gives a sample another value when the batch has other samples: with "
            f"{own} of {count} samples values differ by {float(gap):.2g}. Under another plan, which cuts the "
            "batch elsewhere, the task would learn something else. If the loss is to compare samples (CLIP, SimCLR), "
            "write `whole_batch_loss = True` in the task; else let each value depend on its own sample"
            + at(task, "loss")
        )


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
    """Computes losses of microbatches, divided by the count of the global batch.

    Args:
        domain: the processes that hold the parts of the same samples, each of which has its term of a loss; None: each
            sample is whole.
    """

    def __init__(
        self,
        task: Task,
        observers: Observers | None = None,
        summed_in: torch.dtype = torch.float32,
        domain: Domain | None = None,
    ) -> None:
        self._task, self._observers, self._summed_in = task, observers or Observers(), summed_in
        self._domain, self._processes = domain, 1 if domain is None else domain.size
        self._checked: tuple[object, ...] | None = None
        """Shape, type and rows of the last single loss that fulfilled the contract, which need no further check."""
        self._start: tuple[object, Tensor] | None = None
        self._independence_checked = domain is not None  # by the training of one process, as its values are whole

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
            if self._domain is not None and observers.output is not None:
                output = uncut(output, "training metrics")
                micro = micro._replace(targets=uncut(micro.targets, "training metrics"))
            observers.after_loss(output, micro, self._totals(named, micro))
        observers.phase(BACKWARD)
        return self._loss(values, micro, batch, scale)

    def dry_run(self, output: object, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        """Computes the loss of a microbatch that no step learns from, so no observer sees it."""
        values, _ = self.values(output, micro)
        return self._loss(values, micro, batch, scale)

    def _loss(self, values: Tensor, micro: Microbatch, batch: Batch, scale: float) -> Loss:
        start, total = self._output_gradient(values, micro, batch, scale / self._processes), self.total(values, micro)
        return Loss(values, start, total if self._domain is None else own_term(total, self._processes))

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
        total, weights, size = full(self.total(values, micro)), micro.weights, float(micro.size)
        totals = self._totals(named, micro)
        if isinstance(weights, Mapping):
            return [ScoredLoss(total, size, totals, {name: each.sum() for name, each in weights.items()})]
        return [ScoredLoss(total, size if weights is None else weights.sum(), totals)]

    def values(self, output: object, micro: Microbatch) -> LossValues:
        """Calls `task.loss`; checks its contract for the first microbatch of each shape.

        Raises:
            TaskError: the loss is a mean, or not one value per example or token.
        """
        if isinstance(micro.weights, Mapping) and self._domain is not None and self._domain.exchanges:
            raise PlanError("domain= has no losses that are counted by name: give counts() one tensor, or leave it out")
        loss: Any = self._task.loss(output, micro.targets)
        if loss.__class__ is not Tensor or not loss.dim() or micro.weights is not None:
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
            sums = {name: _weighted_sum(values, weights[name], self._summed_in) for name, values in named.items()}
            return {name: full(total) for name, total in sums.items()}
        return {name: full(self.total(values, micro)) for name, values in named.items()}

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
    """The global sums of one step, still being computed; `read` waits for the sums.

    Args:
        values: a scalar, or [loss, flags, ...].
        own: sums of losses of this process's samples, where they are known.
    """

    def __init__(
        self, values: Tensor, work: dist.Work | None = None, flag: float | None = None, own: Sequence[Tensor] = ()
    ) -> None:
        if work is not None and values.is_cuda:
            work.wait()  # makes the stream wait, not the host
        self._values: Tensor | HostCopy = HostCopy(values) if values.is_cuda else values
        self._work = work
        self._flag, self.own = flag, own

    def read(self) -> Sequence[float]:
        """Returns [the loss's sum over all processes, the sum of their flags]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        values = self._values.read() if isinstance(self._values, HostCopy) else self._values
        return (values.item(), self._flag) if self._flag is not None else values.tolist()[:PAYLOAD_SIZE]


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

    def start(self, loss: Tensor, flag: float, root: Tensor | None = None) -> Roots:
        """Starts the reduction, before the step's last backward, which begins at `root`.

        Returns:
            Additional roots of that backward, and their gradients.
        """
        self._loss, self._flag = loss, flag
        return NO_ROOTS

    def sums(self) -> Sums:
        """Returns the step's sums, after the step's last backward has been called."""
        return Sums(self._loss, flag=self._flag)


class AllReduceReduction(LossReduction):
    """Loss reduction by a separate all-reduce, started before backward, so that it usually ends before it is read."""

    def __init__(self, world: World, summed_in: torch.dtype) -> None:
        super().__init__(world.device, summed_in)
        # Over the whole world, since a flag may be raised anywhere; tensor peers have the same loss.
        self._copies = world.size // world.gradient_size
        self._work: dist.Work | None = None

    def start(self, loss: Tensor, flag: float, root: Tensor | None = None) -> Roots:
        self._loss, self._payload = loss, self.payload(loss / self._copies, flag)
        self._work = dist.all_reduce(self._payload, async_op=True)
        return NO_ROOTS

    def sums(self) -> Sums:
        return Sums(self._payload, self._work, own=(self._loss,))


def loss_reduction(world: World, summed_in: torch.dtype = torch.float32) -> LossReduction:
    """Chooses the loss reduction for `world`'s processes."""
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
