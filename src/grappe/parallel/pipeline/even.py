"""Pads microbatches to one shape, which stages need to exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grappe.data.batch import Microbatch
from grappe.data.loader import rows_of
from grappe.data.order import cut
from grappe.errors import PlanError
from grappe.parallel.pipeline.relay import key_of
from grappe.plan import Plan
from grappe.private_api.torch import tree_leaves, tree_map


def even(micros: Sequence[Microbatch], rows: int) -> tuple[Microbatch, ...]:
    """Pads microbatches to `rows` rows each; padding rows count 0.

    Raises:
        PlanError: the microbatches differ in more than the number of rows.
    """
    found = tuple(_padded(micro, rows) for micro in micros)
    shapes = {key_of(micro.inputs) for micro in found}
    if len(shapes) > 1:
        raise PlanError(
            f"a pipeline's microbatches must have one shape, and a step had {_words(shapes)}: "
            "let collate() pad every sample to the same length"
        )
    return found


class OneShape:
    """Rejects samples of different shapes if data slices must step together."""

    def __init__(self) -> None:
        self._seen: tuple | None = None

    def check(self, micro: Microbatch) -> None:
        """Raises PlanError if a sample of `micro` has another shape than the samples before."""
        shape = tuple(leaf.shape[1:] for leaf in tree_leaves(micro.inputs) if isinstance(leaf, Tensor))
        if self._seen is None:
            self._seen = shape
        if shape != self._seen:
            raise PlanError(
                f"samples of shapes {[list(one) for one in self._seen]} and then {[list(one) for one in shape]}: "
                "with shard or batchnorm=sync a pipeline's samples must keep one shape; "
                "let collate() pad them to the same length"
            )


def largest(plan: Plan, samples: int) -> int:
    """Returns the rows of the largest microbatch of a step of `samples` samples, on any process."""
    return max(1, *(rows for part in range(plan.data_parallel) for rows in _pieces(plan, samples, part)))


def _pieces(plan: Plan, samples: int, part: int) -> list[int]:
    """Returns the rows of each microbatch of a slice."""
    first, last = cut(samples, plan.data_parallel, part)
    bounds = (cut(last - first, plan.microbatches, number) for number in range(plan.microbatches))
    return [b - a for a, b in bounds]


def _words(keys: set[tuple]) -> str:
    return ", ".join(sorted({str(list(leaf[0])) for key in keys for leaf in key[1:]}))


def _padded(micro: Microbatch, rows: int) -> Microbatch:
    missing = rows - rows_of(micro.targets)
    if not missing:
        return micro
    weights = micro.weights
    if weights is not None:
        weights = torch.cat([weights, weights.new_zeros(missing, *weights.shape[1:])])
    return Microbatch(
        inputs=tree_map(lambda leaf: _longer(leaf, missing), micro.inputs),
        targets=tree_map(lambda leaf: _longer(leaf, missing), micro.targets),
        rows=micro.rows,
        weights=weights,
    )


def _longer(leaf: Any, rows: int) -> Any:
    """Repeats the last row as padding: any other input may be invalid for the model."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.cat([leaf, leaf[-1:].expand(rows, *leaf.shape[1:])])


def check_even(plan: Plan, batch_size: int, samples: int) -> None:
    """Rejects padding rows if they would enter batch normalisation's statistics.

    Args:
        samples: the number of training samples.

    Raises:
        PlanError: a step's samples do not divide evenly.
    """
    for step in {min(batch_size, samples), samples % batch_size} - {0}:
        for part in range(plan.data_parallel):
            rows = set(_pieces(plan, step, part))
            if len(rows) > 1 or 0 in rows:
                raise PlanError(
                    f"a step of {step} samples (of {samples:,} in batches of {batch_size}) does not divide into "
                    f"{plan.data_parallel} x microbatches={plan.microbatches} pieces of one even size. A "
                    "pipeline would fill them with rows that enter batch normalisation's statistics: choose another "
                    "batch_size or microbatches, or a model without batch normalisation"
                )
