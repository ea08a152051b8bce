"""Losses: computes the output gradient for backward, and the reported sum, from a model's output.

Shapes: values [B, ...], one per example or token; weights and output_gradient the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.data.counts import flat
from grappe.errors import TaskError
from grappe.errors.user_code import at
from grappe.profiling.phases import BACKWARD
from grappe.step.each_alone import check_each_alone
from grappe.step.given import Values, loss_of
from grappe.step.observers import Observers
from grappe.task import Task

if TYPE_CHECKING:
    from grappe.data.batch import LossWeights


class Loss(NamedTuple):
    """The loss of one microbatch."""

    values: Tensor
    output_gradient: Tensor
    """The gradient of the global batch's mean loss with respect to `values`, from which backward starts."""
    total: Tensor
    """The sum of the microbatch's losses, a float32 scalar without a gradient."""

    def scalar(self) -> Tensor:
        """Returns a scalar whose gradient with respect to `values` is `output_gradient`; its value has no meaning."""
        return (self.values.float() * self.output_gradient.float()).sum()


class Scored(NamedTuple):
    """The loss of an evaluated microbatch."""

    total: Tensor
    """The sum of its losses, a float32 scalar."""
    count: Tensor | float
    """The sum of their weights; without weights the number of samples."""
    named: Mapping[str, Tensor]
    """The sums of its named losses."""
    counts: Mapping[str, Tensor] = {}
    """The sums of their weights, where each has its own."""


class Losses:
    """Calls `task.loss`, checks its contract, and divides by the count of the global batch.

    Args:
        observers: called with BACKWARD, and with the output, once the loss values of a training microbatch are known.
    """

    def __init__(self, task: Task, observers: Observers | None = None) -> None:
        self._task = task
        self._on_phase = observers.phase if observers is not None else None
        self._on_output = observers.output if observers is not None else None
        self._kept: tuple[object, Tensor] | None = None
        self._checked = False  # once, with an evaluation's first microbatch

    def __call__(self, output: object, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        """Computes the loss of a microbatch of `batch`.

        Args:
            scale: factor of the output gradient: the loss scale, or a later divisor of the gradients.

        Raises:
            TaskError: for the reasons of `values`.
        """
        rows = micro.size
        values, named = self.values(output, micro)
        if self._on_output is not None:
            self._on_output(output, micro, self._totals(named, micro))
        if self._on_phase is not None:
            self._on_phase(BACKWARD)
        # By position, as names take a microsecond.
        return Loss(
            values, self._output_gradient(values, micro, batch, rows, scale), self.total(values, micro, rows)
        )

    def _totals(self, named: Mapping[str, Tensor], micro: Microbatch) -> Mapping[str, Tensor]:
        weights = micro.weights
        if isinstance(weights, Mapping):
            return {name: _total(values, weights[name]) for name, values in named.items()}
        return {name: self.total(values, micro, micro.size) for name, values in named.items()}

    def values(self, output: object, micro: Microbatch) -> Values:
        """Computes the loss's values for a microbatch.

        Raises:
            TaskError: the loss is a mean, or not one value per example or token.
        """
        return values_of(self._task, output, micro.targets, micro.size, micro.weights)

    def _output_gradient(
        self, values: Tensor, micro: Microbatch, batch: Batch, rows: int, scale: float
    ) -> Tensor:
        """Computes the gradient of (sum of losses / global count) x `scale` with respect to `values`."""
        if micro.weights is not None:
            return (_flat(micro.weights) * (scale / batch.count)).to(values.dtype)
        per_row = values.numel() // rows
        assert isinstance(batch.count, float), "a count on the device comes with weights"
        key = (values.shape, values.dtype, batch.count, scale, micro.rows)
        if self._kept is None or self._kept[0] != key:
            gradient = torch.full_like(
                values, scale / (batch.count * per_row), memory_format=torch.contiguous_format
            ).detach()
            if micro.rows < rows:
                gradient.view(rows, -1)[micro.rows :] = 0.0  # padding rows
            self._kept = (key, gradient)
        return self._kept[1]

    def scored(self, output: Any, micro: Microbatch, batch: Batch) -> list[Scored]:
        """Returns the sums of an evaluated microbatch; nothing without a sample.

        Raises:
            TaskError: the first microbatch's losses depend on each other.
        """
        if not micro.rows:
            return []
        values, named = found = self.values(output, micro)
        if not self._checked:
            check_each_alone(self._task, output, micro, found)
            self._checked = True
        total, weights = self.total(values, micro, micro.size), micro.weights
        if isinstance(weights, Mapping):
            counts = {name: one.sum() for name, one in weights.items()}
            return [Scored(total, float(micro.size), self._totals(named, micro), counts)]
        count = float(micro.size) if weights is None else weights.sum()
        return [Scored(total, count, self._totals(named, micro))]

    @staticmethod
    def total(values: Tensor, micro: Microbatch, rows: int) -> Tensor:
        """Sums the microbatch's losses to a float32 scalar; without weights, a row counts as the mean of its values."""
        if micro.weights is not None:
            return _total(values, _flat(micro.weights))
        values = values.detach()
        if micro.rows < rows:
            values = values.reshape(rows, -1)[: micro.rows]
        total = values.sum(dtype=torch.float32)
        per_row = values.numel() // max(1, micro.rows)
        return total / per_row if per_row > 1 else total


def _total(values: Tensor, weights: Tensor) -> Tensor:
    return (values.detach().float() * weights).sum()


def _flat(weights: Tensor | Mapping[str, Tensor]) -> Tensor:
    return flat(weights) if isinstance(weights, Mapping) else weights


def values_of(task: Task, output: Any, targets: Any, rows: int, weights: LossWeights) -> Values:
    """Calls `task.loss` for `rows` rows, and checks its contract.

    Raises:
        TaskError: the loss is a mean, or not one value per example or token.
    """
    found = loss_of(task, output, targets)
    values = found.values
    if any(one.dim() == 0 for one in found.each):
        raise TaskError(
            f"{type(task).__name__}.loss() returned one number, so what it averaged over cannot be known. "
            'Return one value per example: reduction="none", as in '
            'F.cross_entropy(output, target, reduction="none")' + at(task, "loss")
        )
    if isinstance(weights, Mapping):
        _check_by_name(task, found.named, weights)
        return Values(flat(found.named, weights), found.named)
    shapes = {name: list(one.shape) for name, one in found.named.items()}
    if any(one.shape != values.shape for one in found.named.values()):
        raise TaskError(
            f"{type(task).__name__}.loss() has losses of different shapes, {shapes}: give each one value for each "
            "example, or say with counts() what the values of each count: a dictionary by the same names"
            + at(task, "loss")
        )
    if weights is None and (values.numel() % rows or values.numel() == 0):
        raise TaskError(
            f"{type(task).__name__}.loss() returned {list(values.shape)} for {rows} rows: return one "
            'value per example or per token (reduction="none"), or say with counts() what each value counts'
            + at(task, "loss")
        )
    if weights is not None and weights.shape != values.shape:
        raise TaskError(
            f"{type(task).__name__}: counts() has shape {list(weights.shape)}, loss() "
            f"{list(values.shape)}: they must be the same{at(task, 'counts')}"
        )
    return found


def _check_by_name(task: Task, named: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Checks that several losses, and their counts, have the same names and shapes."""
    shapes, counted = (
        {name: list(one.shape) for name, one in several.items()} for several in (named, weights)
    )
    if shapes != counted:
        raise TaskError(
            f"{type(task).__name__}: counts() has the shapes {counted}, loss() "
            f"{shapes or 'one loss without a name'}: they must be the same{at(task, 'counts')}"
        )
