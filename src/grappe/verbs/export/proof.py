"""Proves an export: its predictions for a whole split, at several batch sizes, are those of grappe.predict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import tree_leaves
from grappe.verbs.export.samples import ExportSamples

TOLERANCE = 1e-5
"""The largest difference in a row of decimals, as a share of the row's largest number, or of 1."""
NUMBERS = 4_000_000  # of inputs and outputs that are compared at a time

NOTHING = "Nothing was written"

Runner = Callable[[list[Tensor], int], list[Tensor]]
"""From samples [N, ...] and a batch size to predictions [N, ...]."""


class PredictionMismatch(GrappeError):
    """The exported program predicts something else."""

    exit_code = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of a comparison: samples, batch sizes, and the largest difference."""

    split: str
    samples: int
    batch_sizes: tuple[int, ...]
    largest_difference: float


def sizes_of(samples: int, batch_size: int) -> tuple[int, ...]:
    """Lists the batch sizes: 1, 2 and the training's, of which the last batch is short unless it fits."""
    return tuple(sorted({1, min(2, samples), min(batch_size, samples)}))


def prove(
    runners: Mapping[str, Runner],
    samples: ExportSamples,
    predictions: Iterator[Any],
    *,
    names: Sequence[str],
    batch_size: int,
    progress: Callable[[str], None],
) -> Proof:
    """Compares each of `runners`, named by where it runs, with `predictions`, one for each sample in order.

    Raises:
        PredictionMismatch: a prediction is another one; the message names the first sample.
    """
    sizes = sizes_of(samples.length, batch_size)
    rows = (tree_leaves(prediction) for prediction in predictions)
    head = next(rows)
    rows = itertools.chain([head], rows)
    numbers = sum(shape.numel() for shape in samples.shapes) + sum(leaf.numel() for leaf in head)
    count = max(sizes) * max(1, NUMBERS // max(1, numbers * max(sizes)))
    largest = 0.0
    for first in range(0, samples.length, count):
        last = min(first + count, samples.length)
        progress(f"proving: samples {first:,} to {last:,} of {samples.length:,}, at batch sizes {sizes}")
        expected = [torch.stack(column) for column in zip(*itertools.islice(rows, last - first), strict=True)]
        inputs = samples.read(first, last)
        for (where, run), size in itertools.product(runners.items(), sizes):
            computed, place = run(inputs, size), f"{where}, {size} at a time"
            largest = max(largest, compare(expected, computed, names=names, first=first, place=place))
    return Proof(split=samples.split, samples=samples.length, batch_sizes=sizes, largest_difference=largest)


def compare(
    expected: Sequence[Tensor], computed: Sequence[Tensor], *, names: Sequence[str], first: int, place: str
) -> float:
    """Compares predictions [N, ...] by name; returns the largest difference of a row, as a share.

    Args:
        first: the number of the first sample.
        place: where `computed` is from, for the message.

    Raises:
        PredictionMismatch: whole numbers are not equal, or decimals differ by more than TOLERANCE.
    """
    if len(computed) != len(expected):
        raise PredictionMismatch(
            f"{place}: {len(computed)} predictions for a sample, not {len(expected)}: {NOTHING}"
        )
    worst, mismatches = 0.0, []
    for name, ours, theirs in zip(names, expected, computed, strict=True):
        if ours.shape != theirs.shape:
            raise PredictionMismatch(
                f"{place}: {name} is {list(theirs.shape)}, not {list(ours.shape)}: {NOTHING}"
            )
        shares = row_differences(ours, theirs)
        wrong = (~(shares <= (TOLERANCE if ours.is_floating_point() else 0))).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            mismatches.append((row, f"{name} is {_numbers(theirs[row])}, not {_numbers(ours[row])}"))
        worst = max(worst, float(shares.max()))
    if mismatches:
        row, difference = min(mismatches)
        raise PredictionMismatch(
            f"sample {first + row}: {place}, the exported program predicts something else than grappe predict: "
            f"{difference}. {NOTHING}"
        )
    return worst


def row_differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Computes the largest difference in each row of [N, ...], as a share of the row's largest number, or of 1."""
    a, b = (rows.double().reshape(len(ours), -1) for rows in (ours, theirs))
    if not a.shape[1]:
        return torch.zeros(len(ours), dtype=torch.double)
    finite = a.isfinite()
    # What is not finite has to be so on both sides: C++ prints all three as null.
    gap = torch.where(
        finite & b.isfinite(), (a - b).abs(), torch.where(finite == b.isfinite(), 0.0, torch.inf)
    )
    scale = torch.where(finite, a, 0).abs().amax(1).clamp(min=1)
    return gap.amax(1) / scale


def _numbers(row: Tensor) -> str:
    flat = row.flatten()[:8].tolist()
    more = ", …" if row.numel() > len(flat) else ""
    return f"{', '.join(f'{number:.7g}' for number in flat)}{more}"
