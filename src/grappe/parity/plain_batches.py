"""Plain batches: those of the reference, loaded by hand in the order and with the keys that a training has.

Shapes: a batch of B samples in slices ("ways") of one piece or more; B rows in all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from grappe.data.arrays import in_memory
from grappe.data.draw import mix, sample_keys
from grappe.data.keyed import Keyed
from grappe.data.ledger import cut, permute
from grappe.task import Task, overrides

Reorder = Callable[[list[int]], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A step's samples, where they are not those of the order: what a plan has really seen."""

    epoch: int
    ids: tuple[int, ...]
    count: float
    total: int
    """Steps that its schedule is made for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What goes through the model at once."""

    place: int
    """Which of its slice's pieces it is."""
    ids: np.ndarray
    inputs: Any
    targets: Any

    def part(self, first: int, last: int) -> Any:
        """The inputs of some rows in a row."""
        return tree_map(lambda leaf: leaf[first:last] if self._has_rows(leaf) else leaf, self.inputs)

    def moved(self, reorder: Reorder) -> Rows:
        """The same rows in another order, pair by pair: pairs are what a task may mix."""
        size = len(self.ids)
        # A row without a partner stays last: in front, it would part all the others.
        pairs = reorder(list(range(0, size - 1, 2)))
        places = [row for pair in pairs for row in (pair, pair + 1)] + ([size - 1] if size % 2 else [])
        index = torch.tensor(places)
        inputs, targets = tree_map(
            lambda leaf: leaf[index.to(leaf.device)] if self._has_rows(leaf) else leaf,
            (self.inputs, self.targets),
        )
        return Rows(place=self.place, ids=self.ids[places], inputs=inputs, targets=targets)

    def _has_rows(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and bool(leaf.dim()) and len(leaf) == len(self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A step's."""

    ways: tuple[tuple[Rows, ...], ...]
    """By slice and piece, without empty ones."""
    count: float | Tensor

    def moved(self, reorder: Reorder) -> Batch:
        """The same batch, each piece's rows in another order."""
        ways = tuple(tuple(rows.moved(reorder) for rows in way) for way in self.ways)
        return Batch(ways=ways, count=self.count)


class Order:
    """The batches of a trial, loaded.

    Args:
        ways, pieces: the slices of each batch, and the pieces of each slice.
        given: samples, where they are not to be those of the order.
    """

    def __init__(
        self, task: Task, data: Path, device: torch.device, *, ways: int, pieces: int, given: Sequence[Given]
    ) -> None:
        self._task, self._device = task, device
        self._ways, self._pieces, self._given = ways, pieces, given
        self._dataset: Any = task.data("train", data)
        self._arrays = in_memory(self._dataset)
        self.length: int = len(self._dataset)  # type: ignore[arg-type]
        self.per_epoch = -(-self.length // task.batch_size)
        self.total = self._given[0].total if self._given else task.epochs * self.per_epoch

    def batch(self, number: int) -> Batch:
        """The batch of step `number`, cut as asked for."""
        task = self._task
        if self._given:
            epoch, ids = self._given[number].epoch, np.array(self._given[number].ids, dtype=np.int64)
        else:
            epoch, within = divmod(number, self.per_epoch)
            places = np.arange(within * task.batch_size, min((within + 1) * task.batch_size, self.length))
            ids = permute(places, key=mix(task.seed, epoch), length=self.length)
        ways = []
        for way in range(self._ways):
            mine = ids[slice(*cut(len(ids), self._ways, way))]
            pieces = [mine[slice(*cut(len(mine), self._pieces, piece))] for piece in range(self._pieces)]
            ways.append(tuple(self._load(epoch, i, piece) for i, piece in enumerate(pieces) if len(piece)))
        return Batch(ways=tuple(ways), count=self._count(ways, number, len(ids)))

    def _load(self, epoch: int, place: int, ids: np.ndarray) -> Rows:
        if self._arrays is not None:
            inputs, targets = self._arrays.gather(ids, self._device)
        else:
            samples = Keyed(self._dataset, seed=self._task.seed).__getitems__([(epoch, int(i)) for i in ids])
            inputs, targets = tree_map(self._here, self._task.collate(samples))
        if overrides(self._task, "augment"):
            keys = torch.from_numpy(sample_keys(self._task.seed, epoch, ids)).to(self._device)
            inputs, targets = self._task.augment(inputs, targets, keys)
        return Rows(place=place, ids=ids, inputs=inputs, targets=targets)

    def _here(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf

    def _count(self, ways: Sequence[Sequence[Rows]], number: int, samples: int) -> float | Tensor:
        if self._given:
            return self._given[number].count
        counts = [self._task.counts(rows.targets) for way in ways for rows in way]
        known = [one.float().sum() for one in counts if one is not None]
        return torch.stack(known).sum() if known else float(samples)
