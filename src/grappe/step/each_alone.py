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
from grappe.step.given import loss_of
from grappe.task import Task

RELATIVE = {torch.float16: 0.05, torch.bfloat16: 0.05}
"""By the loss's type, the difference that rounding may make, relative to the largest value; others: ROUNDING."""
ROUNDING = 1e-3


@torch.no_grad()
def check_each_alone(task: Task, output: Any, micro: Microbatch, values: Tensor) -> None:
    """Computes the loss of the first half of the rows by itself, and compares it with `values`, [B, ...].

    Nothing is checked where outputs or targets have no row for each sample (a batch of graphs), or where the loss draws
    random numbers.

    Raises:
        TaskError: the values differ, so that under another plan the task would learn something else.
    """
    half = micro.rows // 2
    if micro.padding or not half or values.numel() % micro.rows:
        return
    leaves, nesting = tree_flatten((output, micro.targets))
    if any(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != micro.rows for leaf in leaves):
        return
    part, targets = tree_unflatten([_first(leaf, half) for leaf in leaves], nesting)
    devices = [values.device] if values.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        if _draws(task, output, micro.targets, values):
            return
        try:
            with first_rows(half):
                alone = loss_of(task, part, targets).values
        except Exception:
            return
    whole = values.reshape(micro.rows, -1)[:half].float()
    if alone.numel() != whole.numel():
        return
    gap = (alone.reshape(half, -1).float() - whole).abs().max()
    if gap > RELATIVE.get(values.dtype, ROUNDING) * whole.abs().max():
        raise TaskError(
            f"{type(task).__name__}.loss() gives a sample another value when the batch has other samples: with "
            f"{half} of {micro.rows} samples values differ by {float(gap):.2g}. Under another plan, which cuts the "
            "batch elsewhere, the task would learn something else. If the loss is to compare samples (CLIP, SimCLR), "
            "write `whole_batch_loss = True` in the task; else let each value depend on its own sample"
            + at(task, "loss")
        )


def _draws(task: Task, output: Any, targets: Any, values: Tensor) -> bool:
    """Returns whether the loss has other values when it is computed again, from random numbers of its own."""
    return not torch.equal(loss_of(task, output, targets).values, values)


def _first(leaf: Any, rows: int) -> Any:
    return leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf
