"""Loss contract: calls a task's loss, and checks what it returns.

Shapes: values [B, ...], one for each example or token.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Microbatch, first_rows, flat
from grappe.errors import TaskError
from grappe.errors.user_code import at, calls_users, method_error
from grappe.private_api.torch import tree_flatten, tree_unflatten
from grappe.task import Task

if TYPE_CHECKING:
    from grappe.data.batch import LossWeights

NO_NAMES: Mapping[str, Tensor] = {}
RELATIVE = {torch.float16: 0.05, torch.bfloat16: 0.05}
"""By the loss's type, the difference that rounding may make, relative to the largest value; others: ROUNDING."""
ROUNDING = 1e-3


class LossValues(NamedTuple):
    """The values that a task's `loss` returned for some rows."""

    values: Tensor
    """Of several losses their sum; of losses of several shapes their values one after the other."""
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
    values, named = loss_values
    if any(each.dim() == 0 for each in loss_values.each):
        raise TaskError(
            f"{type(task).__name__}.loss() returned one number, so what it averaged over cannot be known. "
            'Return one value per example: reduction="none", as in '
            'F.cross_entropy(output, target, reduction="none")' + at(task, "loss")
        )
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
    """Computes the loss of the first half of the rows alone, and compares it with `loss_values` of all rows.

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
    first = [leaf[:half] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
    part, targets = tree_unflatten(first, nesting)
    devices = [loss_values.values.device] if loss_values.values.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        again = loss_of(task, output, micro.targets)
        if not all(torch.equal(a, b) for a, b in zip(again.each, loss_values.each, strict=True)):
            return  # the loss draws random numbers of its own
        try:
            with first_rows(half):
                of_half = loss_of(task, part, targets)
        except Exception:
            return
    for values, half_values in zip(loss_values.each, of_half.each, strict=True):
        if loss_values.named and len(values) != micro.rows:
            continue  # one of several losses may have values for boxes, in any order
        if not values.numel() or values.numel() % micro.rows:
            continue
        expected = values.reshape(micro.rows, -1)[:half].float()
        if half_values.numel() != expected.numel():
            continue
        gap = (half_values.reshape(half, -1).float() - expected).abs().max()
        if not gap > RELATIVE.get(values.dtype, ROUNDING) * expected.abs().max():
            continue
        raise TaskError(
            f"{type(task).__name__}.loss() gives a sample another value when the batch has other samples: with "
            f"{half} of {micro.rows} samples values differ by {float(gap):.2g}. Under another plan, which cuts the "
            "batch elsewhere, the task would learn something else. If the loss is to compare samples (CLIP, SimCLR), "
            "write `whole_batch_loss = True` in the task; else let each value depend on its own sample"
            + at(task, "loss")
        )
