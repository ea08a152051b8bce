"""Reference batches: loaded by hand in the order and with the random keys of a training.

Shapes: a batch of B samples in data slices of one piece (microbatch) or more; B rows in all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.data.arrays import in_memory
from grappe.data.draw import mix, sample_keys
from grappe.data.order import cut, permute
from grappe.data.seeded import SeededDataset
from grappe.private_api.torch import tree_map
from grappe.task import Task, overrides

Reorder = Callable[[list[int]], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedBatch:
    """The samples that a step of a trial used, which may differ from those of the sample order."""

    epoch: int
    ids: tuple[int, ...]
    count: float
    total: int
    """The total number of steps, for the schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """One piece: the rows that run through the model at once."""

    piece: int
    """The piece's number in its slice."""
    ids: np.ndarray
    inputs: Any
    targets: Any

    def part(self, first: int, last: int) -> Any:
        """Returns the inputs of rows `first` to `last` - 1."""
        return tree_map(lambda leaf: leaf[first:last] if self._has_rows(leaf) else leaf, self.inputs)

    def reordered(self, reorder: Reorder) -> Rows:
        """Returns the same rows in another order, pair by pair, since a task may mix pairs."""
        size = len(self.ids)
        # A row without a partner stays last: in front, it would part all the others.
        pairs = reorder(list(range(0, size - 1, 2)))
        places = [row for pair in pairs for row in (pair, pair + 1)] + ([size - 1] if size % 2 else [])
        index = torch.tensor(places)
        inputs, targets = tree_map(
            lambda leaf: leaf[index.to(leaf.device)] if self._has_rows(leaf) else leaf,
            (self.inputs, self.targets),
        )
        return Rows(piece=self.piece, ids=self.ids[places], inputs=inputs, targets=targets)

    def _has_rows(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and bool(leaf.dim()) and len(leaf) == len(self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step."""

    slices: tuple[tuple[Rows, ...], ...]
    """Rows by slice and piece, without empty pieces."""
    count: float | Tensor

    def reordered(self, reorder: Reorder) -> Batch:
        """Returns the same batch with each piece's rows in another order."""
        slices = tuple(tuple(rows.reordered(reorder) for rows in pieces) for pieces in self.slices)
        return Batch(slices=slices, count=self.count)


class ReferenceBatches:
    """Loads the batches of a trial.

    Args:
        slices, pieces: the number of slices of each batch, and of pieces of each slice.
        recorded: batches that replace those of the sample order.
    """

    def __init__(
        self,
        task: Task,
        data: Path,
        device: torch.device,
        *,
        slices: int,
        pieces: int,
        recorded: Sequence[RecordedBatch],
    ) -> None:
        self._task, self._device = task, device
        self._slices, self._pieces, self._recorded = slices, pieces, recorded
        self._dataset: Any = task.data("train", data)
        self._arrays = in_memory(self._dataset)
        self.length: int = len(self._dataset)  # type: ignore[arg-type]
        self.per_epoch = -(-self.length // task.batch_size)
        self.total = self._recorded[0].total if self._recorded else task.epochs * self.per_epoch

    def batch(self, number: int) -> Batch:
        """Loads the batch of step `number`, cut into slices and pieces."""
        task = self._task
        if self._recorded:
            epoch, ids = self._recorded[number].epoch, np.array(self._recorded[number].ids, dtype=np.int64)
        else:
            epoch, within = divmod(number, self.per_epoch)
            places = np.arange(within * task.batch_size, min((within + 1) * task.batch_size, self.length))
            ids = permute(places, key=mix(task.seed, epoch), length=self.length)
        slices = []
        for index in range(self._slices):
            mine = ids[slice(*cut(len(ids), self._slices, index))]
            pieces = [mine[slice(*cut(len(mine), self._pieces, piece))] for piece in range(self._pieces)]
            slices.append(tuple(self._load(epoch, i, piece) for i, piece in enumerate(pieces) if len(piece)))
        return Batch(slices=tuple(slices), count=self._count(slices, number, len(ids)))

    def _load(self, epoch: int, piece: int, ids: np.ndarray) -> Rows:
        if self._arrays is not None:
            inputs, targets = self._arrays.gather(ids, self._device)
        else:
            samples = SeededDataset(self._dataset, seed=self._task.seed).__getitems__(
                [(epoch, int(i)) for i in ids]
            )
            inputs, targets = tree_map(self._to_device, self._task.collate(samples))
        if overrides(self._task, "augment"):
            keys = torch.from_numpy(sample_keys(self._task.seed, epoch, ids)).to(self._device)
            inputs, targets = self._task.augment(inputs, targets, keys)
        return Rows(piece=piece, ids=ids, inputs=inputs, targets=targets)

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf

    def _count(self, slices: Sequence[Sequence[Rows]], number: int, samples: int) -> float | Tensor:
        if self._recorded:
            return self._recorded[number].count
        counts = [self._task.counts(rows.targets) for pieces in slices for rows in pieces]
        known = [one.float().sum() for one in counts if one is not None]
        return torch.stack(known).sum() if known else float(samples)
