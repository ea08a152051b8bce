"""Computes the samples of a step: a pure function of seed, epoch, step, batch size and dataset length.

A resumed run needs no stored state, and finds its position in the order at no cost:
an epoch's order is a permutation chosen by a key, evaluated only at the positions that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from grappe.data.draw import mix

_FIRST_BLOCK = 256  # ids: a seek evaluates no more than this (or one batch)
_GROWTH = 8
_LARGEST_BLOCK = 16_384  # ids: larger ones leave the cache, and each stalls the step that needs it

_ROUNDS = 8
_ROUNDS_SMALL = 24  # a grid of few rows and columns has few round functions to choose from
_SMALL = 64
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def permute(positions: NDArray[np.int64], *, key: int, length: int) -> NDArray[np.int64]:
    """Evaluates a permutation of range(length), chosen by `key`, at `positions`: int64 (n,) to int64 (n,).

    A Feistel network over the cells of a nearly square grid that holds `length` (1 to 2^62), walked along its
    cycle until it is back in range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    One cell in sqrt(length) is out of range, so few walk, and the cost depends on neither position nor length; over
    a power of two up to half would. The permutation shuffles; it is no encryption.
    """
    columns = isqrt(length - 1) + 1
    rows = -(-length // columns)
    rounds = _ROUNDS if length > _SMALL else _ROUNDS_SMALL
    keys = [np.uint64(mix(key, index)) for index in range(rounds)]
    image = _feistel(positions.astype(np.uint64), keys, rows, columns)
    outside = np.flatnonzero(image >= length)
    while outside.size:
        walked = _feistel(image[outside], keys, rows, columns)
        image[outside] = walked
        outside = outside[walked >= length]
    return image.view(np.int64)


def _feistel(cells: NDArray[np.uint64], keys: list[np.uint64], rows: int, columns: int) -> NDArray[np.uint64]:
    """Evaluates a permutation of range(rows * columns) at `cells`, uint64 (n,); the number of `keys` is even."""
    width, other_width = np.uint64(rows), np.uint64(columns)
    half = cells // other_width
    other = cells - half * other_width
    hashed, spare = np.empty_like(half), np.empty_like(half)
    for key in keys:
        # in place throughout: new arrays would take longer than the arithmetic
        np.add(other, key, out=hashed)
        hashed *= _FIRST
        np.right_shift(hashed, _HALF, out=spare)
        hashed ^= spare
        hashed *= _SECOND
        hashed >>= _HALF
        hashed *= width
        hashed >>= _HALF
        half += hashed
        # modulo the width: the subtraction wraps to something huge where it was not due
        np.subtract(half, width, out=spare)
        np.minimum(half, spare, out=half)
        half, other, width, other_width = other, half, other_width, width
    half *= other_width
    half += other
    return half


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
    """Order in which every epoch sees each sample once.

    `length` samples (1 to 2^62), `batch_size` of them a step over the whole world (at least 1), the last step of
    an epoch has the remaining samples. With `shuffle` off the order is 0, 1, 2, ... in every epoch.
    """

    seed: int
    length: int
    batch_size: int
    shuffle: bool = True
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

    def order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the ids at positions `start` to `stop` of an epoch's order: int64 (stop - start,)."""
        assert 0 <= start <= stop <= self.length, f"positions {start} to {stop} of {self.length}"
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
