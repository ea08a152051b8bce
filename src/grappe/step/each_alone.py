"""Checks, once, that a sample's loss depends on that sample's output alone, so that a batch can be cut anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grappe.data.batch import Microbatch
from grappe.data.rand_like import first_rows
from grappe.errors import TaskError
from grappe.errors.user_code import at
from grappe.private_api.torch import tree_flatten, tree_unflatten
from grappe.step.given import Values, loss_of
from grappe.task import Task

RELATIVE = {torch.float16: 0.05, torch.bfloat16: 0.05}
"""By the loss's type, the difference that rounding may make, relative to the largest value; others: ROUNDING."""
ROUNDING = 1e-3


@torch.no_grad()
def check_each_alone(task: Task, output: Any, micro: Microbatch, found: Values) -> None:
    """Computes the loss of the first half of the rows by itself, and compares it with what was `found` for all rows.

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
    part, targets = tree_unflatten([_first(leaf, half) for leaf in leaves], nesting)
    devices = [found.values.device] if found.values.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        if _draws(task, output, micro.targets, found):
            return
        try:
            with first_rows(half):
                alone = loss_of(task, part, targets)
        except Exception:
            return
    for values, of_half in zip(found.each, alone.each, strict=True):
        # One of several losses may have values for boxes, in whatever order.
        gap = None if found.named and len(values) != micro.rows else _gap(values, of_half, micro.rows)
        if gap is None:
            continue
        raise TaskError(
            f"{type(task).__name__}.loss() gives a sample another value when the batch has other samples: with "
            f"{half} of {micro.rows} samples values differ by {gap:.2g}. Under another plan, which cuts the "
            "batch elsewhere, the task would learn something else. If the loss is to compare samples (CLIP, SimCLR), "
            "write `whole_batch_loss = True` in the task; else let each value depend on its own sample"
            + at(task, "loss")
        )


def _gap(values: Tensor, of_half: Tensor, rows: int) -> float | None:
    """Returns by how much the values of half of the rows differ from those of all; None: not, or not comparable."""
    if values.numel() % rows or not values.numel():
        return None
    half = rows // 2
    whole = values.reshape(rows, -1)[:half].float()
    if of_half.numel() != whole.numel():
        return None
    gap = (of_half.reshape(half, -1).float() - whole).abs().max()
    return float(gap) if gap > RELATIVE.get(values.dtype, ROUNDING) * whole.abs().max() else None


def _draws(task: Task, output: Any, targets: Any, found: Values) -> bool:
    """Returns whether the loss has other values when it is computed again, from random numbers of its own."""
    again = loss_of(task, output, targets)
    return not all(torch.equal(a, b) for a, b in zip(again.each, found.each, strict=True))


def _first(leaf: Any, rows: int) -> Any:
    return leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf
