"""Losses: computes the output gradient for backward, and the reported sum, from a model's output.

Shapes: values [B, ...], one per example or token; weights and output_gradient the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.errors.user_code import at
from grappe.profiling.phases import BACKWARD
from grappe.step.each_alone import check_each_alone
from grappe.step.given import Values, loss_of
from grappe.task import Task


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


OnOutput = Callable[[Any, Microbatch, Mapping[str, Tensor]], None]
"""Callback, called with a training microbatch's output, itself, and the sums of its named losses."""


class Scored(NamedTuple):
    """The loss of an evaluated microbatch."""

    total: Tensor
    """The sum of its losses, a float32 scalar."""
    count: Tensor | float
    """The sum of their weights; without weights the number of samples."""
    named: Mapping[str, Tensor]
    """The sums of its named losses."""


class Losses:
    """Calls `task.loss`, checks its contract, and divides by the count of the global batch.

    Args:
        on_phase: callback, called with BACKWARD once the loss values of a training microbatch are known.
    """

    def __init__(
        self, task: Task, on_phase: Callable[[int], None] | None = None, on_output: OnOutput | None = None
    ) -> None:
        self._task, self._on_phase, self._on_output = task, on_phase, on_output
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
            return (micro.weights * (scale / batch.count)).to(values.dtype)
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
        values, named = self.values(output, micro)
        if not self._checked:
            check_each_alone(self._task, output, micro, values)
            self._checked = True
        total = self.total(values, micro, micro.size)
        count = float(micro.size) if micro.weights is None else micro.weights.sum()
        return [Scored(total, count, self._totals(named, micro))]

    @staticmethod
    def total(values: Tensor, micro: Microbatch, rows: int) -> Tensor:
        """Sums the microbatch's losses to a float32 scalar; without weights, a row counts as the mean of its values."""
        values = values.detach()
        if micro.weights is not None:
            return (values.float() * micro.weights).sum()
        if micro.rows < rows:
            values = values.reshape(rows, -1)[: micro.rows]
        total = values.sum(dtype=torch.float32)
        per_row = values.numel() // max(1, micro.rows)
        return total / per_row if per_row > 1 else total


def values_of(task: Task, output: Any, targets: Any, rows: int, weights: Tensor | None) -> Values:
    """Calls `task.loss` for `rows` rows, and checks its contract.

    Raises:
        TaskError: the loss is a mean, or not one value per example or token.
    """
    found = loss_of(task, output, targets)
    values = found.values
    if values.dim() == 0:
        raise TaskError(
            f"{type(task).__name__}.loss() returned one number, so what it averaged over cannot be known. "
            'Return one value per example: reduction="none", as in '
            'F.cross_entropy(output, target, reduction="none")' + at(task, "loss")
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
