"""Losses: from a model's output to what backward starts from, and to the sum that is reported.

Shapes: values [B, ...], one per example or token; weights and output_gradient the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.profiling.phases import BACKWARD
from grappe.task import Task


class Loss(NamedTuple):
    """The loss of one microbatch."""

    values: Tensor
    output_gradient: Tensor
    """The gradient of the global batch's mean loss with respect to `values`: what backward starts from."""
    total: Tensor
    """The sum of the microbatch's losses, a float32 scalar without a gradient."""

    def scalar(self) -> Tensor:
        """A scalar whose gradient with respect to `values` is `output_gradient`; its own value means nothing."""
        return (self.values.float() * self.output_gradient.float()).sum()


class Losses:
    """Calls `task.loss`, checks its contract, and divides by the count of the global batch.

    Args:
        on_phase: called with BACKWARD once a training microbatch has its values.
    """

    def __init__(self, task: Task, on_phase: Callable[[int], None] | None = None) -> None:
        self._task, self._on_phase = task, on_phase
        self._kept: tuple[object, Tensor] | None = None

    def __call__(self, output: object, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        """The loss of a microbatch of `batch`.

        Args:
            scale: what the output gradient is multiplied by: a loss scale, or what will be divided by.

        Raises:
            TaskError: as `values`.
        """
        rows = micro.size
        values = self.values(output, micro)
        if self._on_phase is not None:
            self._on_phase(BACKWARD)
        # By position, as names take a microsecond.
        return Loss(
            values, self._output_gradient(values, micro, batch, rows, scale), self.total(values, micro, rows)
        )

    def values(self, output: object, micro: Microbatch) -> Tensor:
        """The loss's values for a microbatch.

        Raises:
            TaskError: the loss is a mean, or not one value per example or token.
        """
        values, rows = self._task.loss(output, micro.targets), micro.size
        if values.dim() == 0:
            raise TaskError(
                f"{type(self._task).__name__}.loss() returned one number, so what it averaged over cannot be known. "
                'Return one value per example: reduction="none", as in '
                'F.cross_entropy(output, target, reduction="none")'
            )
        if micro.weights is None and (values.numel() % rows or values.numel() == 0):
            raise TaskError(
                f"{type(self._task).__name__}.loss() returned {list(values.shape)} for {rows} rows: return one "
                'value per example or per token (reduction="none"), or say with counts() what each value counts'
            )
        if micro.weights is not None and micro.weights.shape != values.shape:
            raise TaskError(
                f"{type(self._task).__name__}: counts() has shape {list(micro.weights.shape)}, loss() "
                f"{list(values.shape)}: they must be the same"
            )
        return values

    def _output_gradient(
        self, values: Tensor, micro: Microbatch, batch: Batch, rows: int, scale: float
    ) -> Tensor:
        """The gradient of (sum of losses / global count) x `scale` with respect to `values`."""
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

    @staticmethod
    def total(values: Tensor, micro: Microbatch, rows: int) -> Tensor:
        """The sum of the microbatch's losses, a float32 scalar; a row's values without weights count as their mean."""
        values = values.detach()
        if micro.weights is not None:
            return (values.float() * micro.weights).sum()
        if micro.rows < rows:
            values = values.reshape(rows, -1)[: micro.rows]
        total = values.sum(dtype=torch.float32)
        per_row = values.numel() // max(1, micro.rows)
        return total / per_row if per_row > 1 else total
