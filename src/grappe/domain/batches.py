"""Cuts batches: which dimension of each input and target is cut, and what a plan with domain= cannot have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grappe.domain.parts import cut, gathered
from grappe.errors import PlanError, TaskError
from grappe.errors.user_line import at
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from grappe.rows.context import NOW
from grappe.rows.tensor import are_rows, usual_rows
from grappe.task import Task, overrides

WITHOUT = ("channels_last", "compile", "cuda_graphs", "exact", "offload", "pipeline", "tensor")
"""Keys that a plan cannot have with domain=."""


def unsupported_reason(plan: Plan) -> str | None:
    """Returns the reason why a plan with domain= does not work; None: it works."""
    if plan.batchnorm == "sync":
        return f"domain={plan.domain} normalises whole samples, of one data slice: leave batchnorm=sync out"
    parts = ("replicate", "shard", "microbatches") if plan.cut == "batch" else ()
    if (part := next((key for key in parts if getattr(plan, key) > 1), None)) is not None:
        return f"cut=batch shows functions the whole batch, which {part}={getattr(plan, part)} would cut: leave it out"
    key = next((key for key in WITHOUT if key in plan.changed_keys()), None)
    return key and f"domain={plan.domain} with {key} is not supported: leave {key} out, or use shard= and recompute"


def dimensions(task: Task, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Returns the dimension that is cut of each leaf of the inputs and the targets; None: it stays whole.

    Raises:
        TaskError: the task's domain() gives another nesting.
        PlanError: the task has no domain(), and nothing is an image or a sequence of tokens.
    """
    if overrides(task, "domain"):
        return task.domain(inputs, targets)
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    pixels = (leaf for leaf in leaves if leaf.is_floating_point() or leaf.dtype == torch.uint8)
    image = next((leaf for leaf in pixels if leaf.dim() in (4, 5)), None)
    tokens = next((leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dim() == 2), None)
    like = image if image is not None else tokens
    if like is None:
        shown = ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves)
        raise PlanError(
            f"domain= cuts the height of images [B, C, H, …] or the length of token ids [B, T], and the inputs are "
            f"{shown}: tell in the task's domain(self, inputs, targets) which dimension is cut"
        )
    space = like.shape[2:] if image is not None else like.shape[1:]

    def of(leaf: Any) -> int | None:
        if not isinstance(leaf, Tensor):
            return None
        if image is not None and leaf.shape[2:] == space:
            return 2
        return 1 if leaf.dim() > 1 and leaf.shape[1 : 1 + len(space)] == space else None

    return tree_map(of, inputs), tree_map(of, targets)


def cut_batch(task: Task, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Returns a batch with each leaf cut as `dimensions` says.

    Raises:
        TaskError: the task's domain() gives another nesting, or its loss is of the whole batch.
        PlanError: nothing is cut, or it is too short.
    """
    if NOW.context.gathers:  # where the rows are cut is a matter of speed alone
        rows = usual_rows((inputs, targets))
        several = rows >= NOW.context.size
        return tree_map(lambda leaf: cut(leaf, 0) if several and are_rows(leaf, 0, rows) else leaf, (inputs, targets))
    if task.whole_batch_loss:
        raise TaskError(f"{type(task).__name__}'s loss compares whole samples: leave domain= out")
    asked = dimensions(task, inputs, targets)
    leaves, nesting = tree_flatten((inputs, targets))
    dims, _ = tree_flatten(asked, is_leaf=lambda leaf: leaf is None)
    if len(dims) != len(leaves) or not any(isinstance(dim, int) for dim in dims):
        raise TaskError(
            f"{type(task).__name__}.domain() gives {asked}: return (dimensions of the inputs, of the targets), nested "
            "as they are, each a number, or None for what stays whole; one at least must be cut" + at(task, "domain")
        )
    parts = [leaf if dim is None else cut(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
    return tree_unflatten(parts, nesting)


def uncut(tree: Any, purpose: str) -> Any:
    """Returns a nesting with each cut tensor gathered, as metrics and predictions need them. Collective."""
    return tree_map(lambda leaf: gathered(leaf, purpose), tree)
