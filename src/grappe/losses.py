"""A loss's values, as the task gives them, to what backward starts from and what is summed.

Shapes: values [B, ...], one per example or token; weights the same; seed, the gradient of the whole loss
with respect to the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.task import Task


class Losses:
    """Calls `task.loss` and checks its contract."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seed: tuple[object, Tensor] | None = None

    def values(self, output: object, micro: Microbatch, rows: int) -> Tensor:
        """The loss's values for a microbatch whose tensors have `rows` rows.

        Raises:
            TaskError: the loss is a mean, or not one value per example or token.
        """
        values = self._task.loss(output, micro.targets)
        if values.dim() == 0:
            raise TaskError(
                f"{type(self._task).__name__}.loss() returned one number, so what it averaged over cannot be known. "
                'Return one value per example: reduction="none", as in '
                'F.cross_entropy(output, target, reduction="none")'
            )
        if values.numel() % rows or values.numel() == 0:
            raise TaskError(
                f"{type(self._task).__name__}.loss() returned {list(values.shape)} for {rows} rows: return one "
                'value per example or per token (reduction="none")'
            )
        if micro.weights is not None and micro.weights.shape != values.shape:
            raise TaskError(
                f"{type(self._task).__name__}: counts() has shape {list(micro.weights.shape)}, loss() "
                f"{list(values.shape)}: they must be the same"
            )
        return values

    def seed(self, values: Tensor, micro: Microbatch, batch: Batch, rows: int, scale: float) -> Tensor:
        """The gradient of (sum of losses / global count) x `scale` with respect to `values`."""
        if micro.weights is not None:
            return (micro.weights * (scale / batch.count)).to(values.dtype)
        per_row = values.numel() // rows
        assert isinstance(batch.count, float), "a count on the device comes with weights"
        key = (values.shape, values.dtype, batch.count, scale, micro.rows)
        if self._seed is None or self._seed[0] != key:
            seed = torch.full_like(
                values, scale / (batch.count * per_row), memory_format=torch.contiguous_format
            ).detach()
            if micro.rows < rows:
                seed.view(rows, -1)[micro.rows :] = 0.0  # rows that were only filled in
            self._seed = (key, seed)
        return self._seed[1]

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
