"""Reference batches: loaded by hand in the order and with the random keys of a training.

Shapes: a batch of B samples in data slices of one piece (microbatch) or more; B rows in all.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.data.arrays import in_memory, with_copies
from grappe.data.batch import SampleIds
from grappe.data.collate import augment, collated
from grappe.data.device_copy import on_device
from grappe.data.draw import mix, sample_keys
from grappe.data.order import cut
from grappe.data.permute import permute
from grappe.data.seeded import SeededDataset
from grappe.data.training_order import drawn_samples
from grappe.private_api.torch import tree_leaves, tree_map
from grappe.task import Task, overrides

Reorder = Callable[[list[int]], list[int]]
Take = Callable[[list[int]], tuple[Any, Any]]


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
    sample_ids: SampleIds
    inputs: Any
    targets: Any

    take: Take
    """The inputs and targets of the rows at some places, in that order, as a batch of their own."""
    cuttable: bool
    """Whether inputs and targets are tensors with a row for each sample, and nothing else."""

    @property
    def ids(self) -> np.ndarray:
        """Returns the samples' ids, int64 (B,)."""
        return self.sample_ids.ids

    def part(self, first: int, last: int) -> Any:
        """Returns the inputs of rows `first` to `last` - 1."""
        return self.take(list(range(first, last)))[0]

    def reordered(self, reorder: Reorder) -> Rows:
        """Returns the same rows in another order, pair by pair, since a task may mix pairs."""
        size = len(self.ids)
        # A row without a partner stays last: in front, it would part all the others.
        pairs = reorder(list(range(0, size - 1, 2)))
        places = [row for pair in pairs for row in (pair, pair + 1)] + ([size - 1] if size % 2 else [])
        inputs, targets = self.take(places)
        take = self.take
        return Rows(
            piece=self.piece,
            sample_ids=self.sample_ids._replace(ids=self.ids[places]),
            inputs=inputs,
            targets=targets,
            take=lambda chosen: take([places[place] for place in chosen]),
            cuttable=self.cuttable,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceBatch:
    """The rows of one step."""

    slices: tuple[tuple[Rows, ...], ...]
    """Rows by slice and piece, without empty pieces."""
    count: float | Tensor
    counts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The global count of each of several losses that have counts of their own."""

    def reordered(self, reorder: Reorder) -> ReferenceBatch:
        """Returns the same batch with each piece's rows in another order."""
        slices = tuple(tuple(rows.reordered(reorder) for rows in pieces) for pieces in self.slices)
        return dataclasses.replace(self, slices=slices)


class ReferenceBatches:
    """Loads the batches of a trial.

    Args:
        steps: the number of steps of the trial, which may go beyond the end of the training.
        slices, pieces: the number of slices of each batch, and of pieces of each slice.
        recorded: batches that replace those of the sample order.
    """

    def __init__(
        self,
        task: Task,
        data: Path,
        device: torch.device,
        *,
        steps: int,
        slices: int,
        pieces: int,
        recorded: Sequence[RecordedBatch],
    ) -> None:
        self._task, self._device = task, device
        self._slices, self._pieces, self._recorded = slices, pieces, recorded
        self._dataset: Any = task.data("train", data)
        self._drawn = drawn_samples(task, self._dataset)
        if self._drawn is not None:
            self._dataset = with_copies(self._dataset)
        self._arrays = in_memory(self._dataset)
        self.stored = len(self._dataset)  # type: ignore[arg-type]
        """Samples of the dataset; `length` is how many of them an epoch has."""
        self.length: int = self.stored if self._drawn is None else self._drawn.samples
        self.per_epoch = -(-self.length // task.batch_size)
        self.total = self._recorded[0].total if self._recorded else max(steps, task.epochs * self.per_epoch)

    def batch(self, number: int) -> ReferenceBatch:
        """Loads the batch of step `number`, cut into slices and pieces."""
        task = self._task
        if self._recorded:
            epoch, ids = self._recorded[number].epoch, np.array(self._recorded[number].ids, dtype=np.int64)
        else:
            epoch, within = divmod(number, self.per_epoch)
            start, stop = within * task.batch_size, min((within + 1) * task.batch_size, self.length)
            ids = self._ids(epoch, start, stop)
        slices = []
        for index in range(self._slices):
            ids_of_slice = ids[slice(*cut(len(ids), self._slices, index))]
            pieces = [
                ids_of_slice[slice(*cut(len(ids_of_slice), self._pieces, piece))]
                for piece in range(self._pieces)
            ]
            slices.append(tuple(self._load(epoch, i, piece) for i, piece in enumerate(pieces) if len(piece)))
        counts = [self._task.counts(rows.targets) for pieces in slices for rows in pieces]
        return ReferenceBatch(
            slices=tuple(slices),
            count=self._count(counts, number, len(ids)),
            counts=_by_name([count for count in counts if isinstance(count, Mapping)]),
        )

    def _ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        task = self._task
        if self._drawn is not None:
            return self._drawn.order(task.seed, epoch, start, stop, task.batch_size)
        return permute(np.arange(start, stop), key=mix(task.seed, epoch), length=self.length)

    def _load(self, epoch: int, piece: int, ids: np.ndarray) -> Rows:
        collate = self._collate(epoch, ids)
        everything = list(range(len(ids)))
        plain = collate(everything)

        def augmented(batch: tuple[Any, Any], places: list[int]) -> tuple[Any, Any]:
            if not overrides(self._task, "augment"):
                return batch
            keys = torch.from_numpy(sample_keys(self._task.seed, epoch, ids[places])).to(self._device)
            return augment(self._task, *batch, keys)

        inputs, targets = augmented(plain, everything)
        cuttable = _row_by_row(collate, plain, len(ids)) and _all_rows((inputs, targets), len(ids))
        if cuttable:
            take: Take = functools.partial(_taken, (inputs, targets))
        else:  # a graph's nodes, a list of boxes: only the samples can be put into another order
            take = lambda places: augmented(collate(places), places)  # noqa: E731
        return Rows(
            piece=piece,
            sample_ids=SampleIds(self._task.seed, epoch, ids),
            inputs=inputs,
            targets=targets,
            take=take,
            cuttable=cuttable,
        )

    def _collate(self, epoch: int, ids: np.ndarray) -> Take:
        """Gives the batch of samples at some places of `ids`, each of which is loaded once."""
        arrays = self._arrays
        if arrays is not None:
            return lambda places: arrays.gather(ids[places], self._device)
        seeded = SeededDataset(self._dataset, seed=self._task.seed)
        samples = seeded.__getitems__([(epoch, int(i)) for i in ids])
        return lambda places: tree_map(
            self._to_device, collated(self._task, [copy.deepcopy(samples[place]) for place in places])
        )

    def _to_device(self, leaf: Any) -> Any:
        return on_device(leaf, self._device)

    def _count(self, counts: Sequence[Any], number: int, samples: int) -> float | Tensor:
        if self._recorded:
            return self._recorded[number].count
        sums = [count.float().sum() for count in counts if isinstance(count, Tensor)]
        return torch.stack(sums).sum() if sums else float(samples)


def _by_name(counts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = counts[0] if counts else ()
    return {name: torch.stack([count[name].float().sum() for count in counts]).sum() for name in names}


def _taken(batch: tuple[Any, Any], places: list[int]) -> tuple[Any, Any]:
    index = torch.tensor(places)
    return tree_map(lambda leaf: leaf[index.to(leaf.device)], batch)


def _all_rows(batch: Any, rows: int) -> bool:
    """Returns whether all leaves are tensors of the batch's length."""
    leaves = tree_leaves(batch)
    return all(isinstance(leaf, Tensor) and bool(leaf.dim()) and len(leaf) == rows for leaf in leaves)


def _row_by_row(collate: Take, batch: tuple[Any, Any], rows: int) -> bool:
    """Tries whether collating the samples in another order puts the rows of each tensor into that order."""
    if not _all_rows(batch, rows):
        return False
    places = list(range(rows))[::-1]
    expected, collated_leaves = tree_leaves(_taken(batch, places)), tree_leaves(collate(places))
    return len(expected) == len(collated_leaves) and all(
        isinstance(b, Tensor) and torch.equal(a, b) for a, b in zip(expected, collated_leaves, strict=True)
    )
