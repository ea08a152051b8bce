"""Proves an export: its predictions for a whole split, at several batch sizes, are those of grappe.predict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import tree_leaves
from grappe.verbs.export.samples import Samples

TOLERANCE = 1e-5
"""The largest difference in a row of decimals, as a share of the row's largest number, or of 1."""
NUMBERS = 4_000_000  # of inputs and outputs that are compared at a time

Runner = Callable[[list[Tensor], int], list[Tensor]]
"""From samples [N, ...] and a batch size to predictions [N, ...]."""


class Differs(GrappeError):
    """The exported program predicts something else.

    Args:
        sample: the first one that differs, where it is known; then `batch`, in which it was computed: [first, last).
    """

    exit_code = 1

    def __init__(
        self, message: str, *, sample: int | None = None, batch: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.sample, self.batch = sample, batch


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
    runners: dict[str, Runner],
    samples: Samples,
    predictions: Iterator[Any],
    *,
    names: Sequence[str],
    batch_size: int,
    progress: Callable[[str], None],
) -> Proof:
    """Compares each of `runners`, named by where it runs, with `predictions`, one for each sample in order.

    Raises:
        Differs: a prediction is another one; the message names the first sample.
    """
    sizes = sizes_of(samples.length, batch_size)
    largest, first = 0.0, 0
    rows = (tree_leaves(one) for one in predictions)
    head = next(rows)
    rows = itertools.chain([head], rows)
    count = _chunk(samples, head, max(sizes))
    while first < samples.length:
        last = min(first + count, samples.length)
        progress(f"proving: samples {first:,} to {last:,} of {samples.length:,}, at batch sizes {sizes}")
        wanted = [torch.stack(column) for column in zip(*itertools.islice(rows, last - first), strict=True)]
        inputs = samples.read(first, last)
        for (where, run), size in itertools.product(runners.items(), sizes):
            found = run(inputs, size)
            place = f"{where}, {size} at a time"
            largest = max(largest, compare(wanted, found, names=names, first=first, size=size, place=place))
        first = last
    return Proof(split=samples.split, samples=samples.length, batch_sizes=sizes, largest_difference=largest)


def _chunk(samples: Samples, head: list[Tensor], batch: int) -> int:
    numbers = sum(shape.numel() for shape in samples.shapes) + sum(one.numel() for one in head)
    return batch * max(1, NUMBERS // max(1, numbers * batch))


def compare(
    wanted: Sequence[Tensor],
    found: Sequence[Tensor],
    *,
    names: Sequence[str],
    first: int,
    size: int,
    place: str,
) -> float:
    """Compares predictions [N, ...] by name; returns the largest difference of a row, as a share.

    Args:
        first: the number of the first sample.
        size: samples in a batch; the first batch begins with the first sample.
        place: where `found` was computed, for the message.

    Raises:
        Differs: whole numbers are not equal, or decimals differ by more than TOLERANCE.
    """
    if len(found) != len(wanted):
        raise Differs(f"{place}: {len(found)} predictions for a sample, not {len(wanted)}: {_NOTHING}")
    worst, bad = 0.0, []
    for name, ours, theirs in zip(names, wanted, found, strict=True):
        if ours.shape != theirs.shape:
            raise Differs(f"{place}: {name} is {list(theirs.shape)}, not {list(ours.shape)}: {_NOTHING}")
        shares = row_differences(ours, theirs)
        wrong = (~(shares <= (TOLERANCE if ours.is_floating_point() else 0))).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            bad.append((row, f"{name} is {_shown(theirs[row])}, not {_shown(ours[row])}"))
        worst = max(worst, float(shares.max()))
    if bad:
        row, what = min(bad)
        start = row // size * size
        raise Differs(
            f"sample {first + row}: {place}, the exported program predicts something else than grappe predict: {what}. "
            f"{_NOTHING}",
            sample=first + row,
            batch=(first + start, first + min(start + size, len(wanted[0]))),
        )
    return worst


_NOTHING = "Nothing was written"


def row_differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Computes the largest difference in each row of [N, ...], as a share of the row's largest number, or of 1."""
    a, b = (one.double().reshape(len(ours), -1) for one in (ours, theirs))
    if not a.shape[1]:
        return torch.zeros(len(ours), dtype=torch.double)
    known = a.isfinite()
    # What is not finite has to be so on both sides: C++ prints all three as null.
    gap = torch.where(known & b.isfinite(), (a - b).abs(), torch.where(known == b.isfinite(), 0.0, torch.inf))
    scale = torch.where(known, a, 0).abs().amax(1).clamp(min=1)
    return gap.amax(1) / scale


def _shown(row: Tensor) -> str:
    flat = row.flatten()[:8].tolist()
    more = ", …" if row.numel() > len(flat) else ""
    return f"{', '.join(f'{one:.7g}' for one in flat)}{more}"
