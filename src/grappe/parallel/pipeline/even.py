"""Pads microbatches to one shape, which stages need to exchange tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grappe.data.batch import Microbatch
from grappe.data.order import cut
from grappe.data.rows import at_rows
from grappe.errors import PlanError
from grappe.parallel.pipeline.relay import key_of
from grappe.plan import Plan


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
    missing = rows - micro.size
    if not missing:
        return micro
    # The last row again: what a model takes is not known, but that it takes this.
    places = [*range(micro.size), *[micro.size - 1] * missing]
    weights = micro.weights
    if isinstance(weights, Mapping):
        weights = {name: _with_zeros(one, micro, missing, name) for name, one in weights.items()}
    elif weights is not None:
        weights = _with_zeros(weights, micro, missing)
    inputs, targets = at_rows((micro.inputs, micro.targets), places, micro.size)
    drawn_for = micro.sample_ids
    if drawn_for is not None:
        drawn_for = drawn_for._replace(ids=drawn_for.ids[places])
    return Microbatch(inputs, targets, micro.rows, weights, rows - micro.rows, drawn_for)


def _with_zeros(weights: Tensor, micro: Microbatch, missing: int, name: str = "") -> Tensor:
    if name and len(weights) != micro.size:
        raise PlanError(
            f"a pipeline's microbatches must have one size, and one of {micro.size} samples would be filled with rows "
            f"that count nothing: counts() has no row for each sample for {name!r}. Choose a batch_size that "
            "microbatches= divides, also what is left for an epoch's last step"
        )
    return torch.cat([weights, weights.new_zeros(missing, *weights.shape[1:])])


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
