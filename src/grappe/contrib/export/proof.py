"""Proves an export: its predictions for a whole split, at several batch sizes, equal grappe.predict's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.data.arrays import in_memory
from grappe.data.collate import takes_training
from grappe.data.datasets import dataset_of, prepare
from grappe.errors import DataError, GrappeError, TaskError
from grappe.launch import files
from grappe.private_api.torch import TreeSpec, tree_flatten, tree_leaves
from grappe.task import Task
from grappe.verbs.predict.inputs import split_reader

TOLERANCE = 1e-5
"""The largest difference in a row of decimals, as a share of the row's largest number, or of 1."""
NUMBERS = 4_000_000  # of inputs and outputs that are compared at a time
TYPES = {
    torch.float16: "f2", torch.float32: "f4", torch.float64: "f8", torch.uint8: "u1", torch.int8: "i1",
    torch.int16: "i2", torch.int32: "i4", torch.int64: "i8", torch.bool: "b1",
}  # fmt: skip
"""Types that .npy files can hold, by NumPy's names."""
EXAMPLE = 3  # samples: torch.export takes 0 and 1 for constants
NOTHING = "Nothing was written"

Runner = Callable[[list[Tensor], int], list[Tensor]]
"""From samples [N, ...] and a batch size to predictions [N, ...]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSamples:
    """A split's samples, and the changes to a batch before the model sees it."""

    split: str
    length: int
    transform: Callable[[Any], Any] | None
    """First step of the program: uint8 images to normalised ones, say."""
    spec: TreeSpec
    """Nesting of a batch's tensors."""
    shapes: tuple[torch.Size, ...]
    """Shapes of one sample's tensors."""
    dtypes: tuple[torch.dtype, ...]
    batch: Callable[[np.ndarray], Any]

    def read(self, ids: np.ndarray) -> list[Tensor]:
        """Reads the samples `ids` [B]: the tensors of a batch, each [B, ...].

        Raises:
            TaskError: they have another form or shape than the first sample.
        """
        leaves, spec = tree_flatten(self.batch(ids))
        forms = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if spec != self.spec or forms != [
            (tuple(shape), dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]:
            raise TaskError(
                f"the samples from {ids[0]} on have other shapes or types than the first ({forms}): an exported "
                "program takes samples of one shape; pad them in data() or collate() to one length"
            )
        return [leaf.contiguous() for leaf in leaves]

    def example(self) -> list[Tensor]:
        """Reads the batch that the program is traced with."""
        return self.read(np.arange(EXAMPLE) % self.length)


def samples_of(task: Task, split: str, folder: Path) -> ExportSamples:
    """Prepares the samples of a task's split.

    Raises:
        DataError: there is none.
        TaskError: a batch of inputs is no nesting of plain tensors of numbers.
    """
    prepare(task, folder)
    dataset = dataset_of(task, split, folder)
    length = len(dataset)  # pyrefly: ignore
    if not length:
        raise DataError(f"{split}: there is no sample to prove an export with")
    arrays, transform = in_memory(dataset), None
    if arrays is not None and arrays.transform is not None and not takes_training(task):
        stored, transform = arrays.stored, arrays.transform

        def batch(ids: np.ndarray) -> Any:
            return stored(ids)[0]
    else:
        batch = split_reader(task, dataset)
    leaves, spec = tree_flatten(batch(np.arange(min(EXAMPLE, length))))
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dtype not in TYPES or not leaf.dim():
            what = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TaskError(
                f"the model's inputs hold {what}: an exported program takes tensors [N, ...] of numbers that .npy "
                f"files have ({', '.join(TYPES.values())})"
            )
    shapes, dtypes = tuple(leaf.shape[1:] for leaf in leaves), tuple(leaf.dtype for leaf in leaves)
    return ExportSamples(
        split=split, length=length, transform=transform, spec=spec, shapes=shapes, dtypes=dtypes, batch=batch
    )


def write_npy(folder: Path, names: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """Writes tensors to .npy files; returns the files."""
    arrays = [folder / f"{name}.npy" for name in names]
    for file, tensor in zip(arrays, tensors, strict=True):
        with files.new_file(file) as stream:
            np.save(stream, tensor.numpy(), allow_pickle=False)
    return [str(file) for file in arrays]


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
    """Lists the batch sizes: 1, 2 and the training's; the last batch is short where the size does not fit."""
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
        batches = ", ".join(map(str, sizes))
        progress(f"proving: samples {first:,} to {last:,} of {samples.length:,}, at batch sizes {batches}")
        expected = [torch.stack(column) for column in zip(*itertools.islice(rows, last - first), strict=True)]
        inputs = samples.read(np.arange(first, last))
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
        raise PredictionMismatch(f"{place}: {len(computed)} predictions for a sample, not {len(expected)}: {NOTHING}")
    worst, mismatches = 0.0, []
    for name, ours, theirs in zip(names, expected, computed, strict=True):
        if ours.shape != theirs.shape:
            raise PredictionMismatch(f"{place}: {name} is {list(theirs.shape)}, not {list(ours.shape)}: {NOTHING}")
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
    gap = torch.where(finite & b.isfinite(), (a - b).abs(), torch.where(finite == b.isfinite(), 0.0, torch.inf))
    scale = torch.where(finite, a, 0).abs().amax(1).clamp(min=1)
    return gap.amax(1) / scale


def _numbers(row: Tensor) -> str:
    flat = row.flatten()[:8].tolist()
    more = ", …" if row.numel() > len(flat) else ""
    return f"{', '.join(f'{number:.7g}' for number in flat)}{more}"
