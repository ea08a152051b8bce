"""Computes the samples of a step: a pure function of seed, epoch, step, batch size and dataset length.

A resumed run needs no stored state, and finds its position in the order at no cost:
an epoch's order is a permutation chosen by a key, evaluated only at the positions that are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grappe.data.draw import mix, permute
from grappe.data.sampling import DrawnSamples

_FIRST_BLOCK = 256  # ids: a seek evaluates no more than this (or one batch)
_GROWTH = 8
_LARGEST_BLOCK = 16_384  # ids: larger ones leave the cache, and each stalls the step that needs it


def cut(size: int, parts: int, part: int) -> tuple[int, int]:
    """Returns the begin and the end of slice `part` of `parts` in `size` rows; the slice may be empty.

    The slices cover the rows in order, each once, and differ by at most one pair of rows. They are cut at even
    positions only, so rows 2j and 2j+1, which are mixed with each other, stay together; so they do when a slice
    is cut again into microbatches.
    """
    pairs = (size + 1) // 2
    return 2 * (pairs * part // parts), min(2 * (pairs * (part + 1) // parts), size)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Order in which every epoch sees each sample once, or as often as `sampling` says.

    `length` samples an epoch (1 to 2^62), `batch_size` of them a step over the whole world (at least 1), the last
    step of an epoch has the remaining samples. With `shuffle` off the order is 0, 1, 2, ... in every epoch. With
    `sampling`, which has `length` samples an epoch, a copy c of a sample i of N is the id i + c N.
    """

    seed: int
    length: int
    batch_size: int
    shuffle: bool = True
    sampling: DrawnSamples | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, the last short one included."""
        return -(-self.length // self.batch_size)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Yields (step, epoch, ids) of blocks that cover steps `start` to `stop`, counted over all epochs.

        A block begins with `step`, and has the ids of whole steps of one epoch, one after the other: int64 (n,). Its
        ids are evaluated together; the first block is small, so that a jump costs little.
        """
        size = _FIRST_BLOCK
        while start < stop:
            epoch, within = divmod(start, self.steps_per_epoch)
            steps = min(max(size // self.batch_size, 1), self.steps_per_epoch - within, stop - start)
            first = within * self.batch_size
            yield start, epoch, self.order(epoch, first, min(first + steps * self.batch_size, self.length))
            start += steps
            size = min(size * _GROWTH, _LARGEST_BLOCK)

    def ids(self, epoch: int, step_in_epoch: int) -> NDArray[np.int64]:
        """Returns the ids of a step's global batch, in order: int64 (batch_size,), shorter at an epoch's end."""
        start = step_in_epoch * self.batch_size
        assert 0 <= start < self.length, f"position {start} of {self.length}"
        return self.order(epoch, start, min(start + self.batch_size, self.length))

    def samples(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the samples of `ids`; several may be copies of one sample."""
        return ids if self.sampling is None else ids % self.sampling.length

    def order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the ids at positions `start` to `stop` of an epoch's order: int64 (stop - start,)."""
        assert 0 <= start <= stop <= self.length, f"positions {start} to {stop} of {self.length}"
        if self.sampling is not None:
            return self.sampling.order(self.seed, epoch, start, stop, self.batch_size)
        positions = np.arange(start, stop, dtype=np.int64)
        if not self.shuffle:
            return positions
        return permute(positions, key=mix(self.seed, epoch), length=self.length)
