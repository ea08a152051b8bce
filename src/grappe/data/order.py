"""Computes the samples of a step: a pure function of seed, epoch, step, batch size and dataset length.

A resumed run needs no stored state, and finds its position in the order at no cost:
an epoch's order is a permutation chosen by a key, evaluated only at the positions that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


class _Block:
    """The part of an order that was evaluated last."""

    def __init__(self) -> None:
        nothing = np.empty(0, np.int64)
        # one tuple, replaced whole: a thread that reads ahead sees the old block or the new one
        self.held: tuple[int, int, int, int, NDArray[np.int64]] = (-1, 0, 0, 0, nothing)

    def __reduce__(self) -> tuple[type[_Block], tuple[()]]:
        return _Block, ()  # a data worker that receives a SampleOrder need not receive its block


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
    _block: _Block = field(default_factory=_Block, init=False, repr=False, compare=False)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, the last short one included."""
        return -(-self.length // self.batch_size)

    def ids(self, epoch: int, step_in_epoch: int) -> NDArray[np.int64]:
        """Returns the ids of a step's global batch, in order: int64 (batch_size,), shorter at an epoch's end.

        Steps may be read in any order; consecutive steps are fastest.
        """
        start = step_in_epoch * self.batch_size
        stop = min(start + self.batch_size, self.length)
        held_epoch, first, last, _, block = self._block.held
        if epoch != held_epoch or not first <= start < stop <= last:
            first, block = self._evaluate(epoch, start)
        # a copy, since torch.from_numpy warns about what it may not write to
        return block[start - first : stop - first].copy()

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

    def _evaluate(self, epoch: int, start: int) -> tuple[int, NDArray[np.int64]]:
        """Evaluates and keeps the block that begins at `start`: small after a jump, larger for consecutive reads."""
        assert 0 <= start < self.length, f"position {start} of {self.length}"
        held_epoch, _, last, size, _ = self._block.held
        at_the_end = last == self.length
        goes_on = (epoch, start) == ((held_epoch + 1, 0) if at_the_end else (held_epoch, last))
        size = min(size * _GROWTH, _LARGEST_BLOCK) if goes_on else _FIRST_BLOCK
        # whole batches, so that no step straddles two blocks
        stop = min(start + max(size // self.batch_size, 1) * self.batch_size, self.length)
        block = self.order(epoch, start, stop)
        self._block.held = (epoch, start, stop, size, block)
        return start, block
