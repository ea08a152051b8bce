"""Counts: the weight of each value of a task's losses, and what their sums over the global batch are divided by.

A task counts the values of its loss together, or those of each of several losses by themselves: with C_k the counts of
loss k over the global batch of N samples, what is learned is the sum over k of (sum of counts x values) / C_k. The
weights of a training batch are then the counts times N / C_k, so that everything else divides by N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grappe.data.batch import Microbatch
from grappe.data.pieces import ExactPieces
from grappe.errors import TaskError
from grappe.errors.user_code import at
from grappe.task import Task

if TYPE_CHECKING:
    from grappe.data.batch import LossWeights


def counts_of(task: Task, targets: Any) -> LossWeights:
    """Returns the weight of each value of the loss; of several losses with counts of their own, by their names.

    Raises:
        TaskError: it is no tensor, and no dictionary of tensors.
    """
    counts: Any = task.counts(targets)
    if counts is None or isinstance(counts, Tensor):
        return counts
    wrong: Any = counts
    if isinstance(counts, Mapping) and counts:
        wrong = next((count for count in counts.values() if not isinstance(count, Tensor)), None)
        if wrong is None and None not in counts.values():
            return dict(counts)
    raise TaskError(
        f"{type(task).__name__}.counts() returned {type(wrong).__name__}: return a tensor in the shape of the loss, 0 "
        "where a value counts nothing; for several losses a dictionary of such tensors by their names; or None"
        + at(task, "counts")
    )


def as_weights(counts: LossWeights, *, counted: bool) -> LossWeights:
    """Returns counts as float32; zeros unless `counted`, as for a row of padding."""
    if isinstance(counts, Mapping):
        return {name: _as_weights(each, counted) for name, each in counts.items()}
    return None if counts is None else _as_weights(counts, counted)


def _as_weights(counts: Tensor, counted: bool) -> Tensor:
    return counts.float() if counted else torch.zeros_like(counts, dtype=torch.float32)


def divided(
    micros: tuple[Microbatch, ...], samples: int, exact: ExactPieces | None, group: Any
) -> tuple[float | Tensor, tuple[Microbatch, ...]]:
    """Returns the divisor of the global batch's sum of losses, and the microbatches with their final weights.

    Collective over `group` where there are weights.

    Args:
        samples: N, of the global batch.
        exact: the plan's pieces, whose counts are summed in their order, so that the sum has the same bits.
        group: of the data slices; None: there is one.
    """
    several = [micro.weights for micro in micros if micro.weights is not None]
    if not several:
        return float(samples), micros
    total = _total(torch.stack([_sums(weights) for weights in several]), exact, group)
    if not isinstance(several[0], Mapping):
        return total, micros
    factors = dict(zip(several[0], torch.where(total > 0, samples / total, 0.0).unbind(), strict=True))
    return float(samples), tuple(micro._replace(weights=_times(micro.weights, factors)) for micro in micros)


def _sums(weights: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Sums a microbatch's weights: a scalar, or one number for each loss."""
    if isinstance(weights, Mapping):
        return torch.stack([each.sum() for each in weights.values()])
    return weights.sum()


def _total(sums: Tensor, exact: ExactPieces | None, group: Any) -> Tensor:
    """Sums what each microbatch has, over all data slices."""
    if group is None:
        return sums.sum(0)
    if exact is not None:
        return exact.gathered(sums, group).sum(0)
    total = sums.sum(0)
    torch.distributed.all_reduce(total, group=group)
    return total


def _times(weights: LossWeights, factors: Mapping[str, Tensor]) -> LossWeights:
    assert isinstance(weights, Mapping), "counts() gives the same kind for each microbatch"
    return {name: each * factors[name] for name, each in weights.items()}


def flat(several: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    """Returns the values, or the weights, of several losses one after the other: [values of all]."""
    return torch.cat([several[name].flatten() for name in names or several])
