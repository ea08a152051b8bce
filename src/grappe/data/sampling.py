"""Computes the samples of a step and of an epoch: their order; by weight, balanced over classes, batched by length.

Every choice is a function of seed, epoch, step and dataset length alone: a resumed run needs no stored state, and it is
the same under any plan. An epoch's order is a permutation chosen by a key, evaluated only at the positions that are
read. Shapes: N samples of the dataset, n samples an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data.draw import mix, permute
from grappe.errors import TaskError

_OFFSET, _WINDOW = 0x6F66, 0x7769  # words of keys, so that they are no sample's


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """Samples of an epoch of training, how often each comes, and in which batches: what `Task.sampling` returns.

    An epoch of n samples has a sample of weight w in n w / (sum of weights) copies, rounded up or down at random in
    each epoch; with equal weights, each sample once. Copies are augmented independently.
    """

    weights: Any = None
    """A number for each sample, [N], not negative: how often it is seen relative to the others."""
    classes: Any = None
    """A class for each sample, [N], whole numbers or words: all classes are seen equally often."""
    lengths: Any = None
    """A length for each sample, [N]: a batch has samples of similar lengths, so that little is padded."""
    shuffle: bool = True
    """Whether an epoch is in random order; else in the dataset's, which lengths and weights keep."""
    samples: int | None = None
    """Samples an epoch, n; None: as many as the dataset has."""
    window: int = 64
    """Batches that are sorted by length together: more waste less on padding, fewer mix better."""
    copies: int = 1
    """Copies of each sample in its batch, augmented independently: repeated augmentation. An epoch has fewer."""


class EpochOrder(Protocol):
    """The order of a dataset's samples in an epoch, a function of the seed and the dataset alone."""

    length: int
    """Samples of the dataset."""
    samples: int
    """Samples of an epoch."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that the order depends on."""

    @property
    def repeats(self) -> bool:
        """Returns whether a sample may come several times an epoch."""

    def order(self, seed: int, epoch: int, start: int, stop: int, batch_size: int) -> NDArray[np.int64]:
        """Returns the ids at positions `start` to `stop` of an epoch's order: int64 (stop - start,)."""


class DrawnSamples:
    """The samples of a Sampling's epochs, of a dataset of `length` samples.

    A copy of sample i is the id i + c N, c from 0: its augmentation has other random numbers than the others'.

    Raises:
        TaskError: the arrays do not fit the dataset, or a number is out of its range.
    """

    def __init__(self, sampling: Sampling, length: int) -> None:
        self.length = length
        self.samples = length if sampling.samples is None else sampling.samples
        self._window, self._shuffle, self._copies = sampling.window, sampling.shuffle, sampling.copies
        if self.samples < 1 or self._window < 1:
            raise TaskError("sampling(): samples and window must be at least 1")
        if self._copies < 1:
            raise TaskError(f"sampling(): copies={self._copies}: it must be at least 1")
        others = (sampling.weights, sampling.classes, sampling.lengths, sampling.samples)
        if self._copies > 1 and any(column is not None for column in others):
            raise TaskError("sampling(): copies cannot be combined with weights, classes, lengths or samples")
        if sampling.weights is not None and sampling.classes is not None:
            raise TaskError("sampling(): give weights or classes, not both")
        weights: NDArray[np.float64] | None = None
        if sampling.classes is not None:
            column = _column("classes", sampling.classes, length)
            _, places, counts = np.unique(column, return_inverse=True, return_counts=True)
            weights = 1.0 / counts[places]
        elif sampling.weights is not None:
            weights = _column("weights", sampling.weights, length).astype(np.float64)
            if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
                raise TaskError("sampling(): weights must be finite and not negative, and some above 0")
        self._lengths = None if sampling.lengths is None else _column("lengths", sampling.lengths, length)
        if weights is None and self.samples != length:
            weights = np.ones(length)
        self._bounds = None if weights is None else np.cumsum(weights) * (self.samples / weights.sum())
        self._last = length - 1 if weights is None else int(np.flatnonzero(weights)[-1])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the order depends on, to notice another one on resuming."""
        digest = xxhash.xxh3_64(
            f"{self.samples} {self._window if self._lengths is not None else 0} {self._shuffle}".encode()
        )
        if self._copies > 1:
            digest.update(f"copies {self._copies}".encode())
        for column in (self._bounds, self._lengths):
            digest.update(b"" if column is None else np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    @property
    def repeats(self) -> bool:
        """Returns whether a sample may come several times an epoch, or never."""
        return self._bounds is not None or self._copies > 1

    def order(self, seed: int, epoch: int, start: int, stop: int, batch_size: int) -> NDArray[np.int64]:
        """Returns the ids at positions `start` to `stop` of an epoch's order: int64 (stop - start,)."""
        if self._copies > 1:
            return self._copied(seed, epoch, start, stop, batch_size)
        if self._lengths is None:
            return self._at(seed, epoch, start, stop)
        size = self._window * batch_size
        windows = range(start // size, -(-stop // size))
        parts = [self._by_length(seed, epoch, window, batch_size) for window in windows]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
        first = start - windows.start * size
        return ids[first : first + stop - start]

    def _at(self, seed: int, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop, dtype=np.int64)
        slots = positions
        if self._shuffle:
            slots = permute(positions, key=mix(seed, epoch), length=self.samples)
        if self._bounds is None:
            return slots
        # Systematic sampling: slot k belongs to the sample whose part of [0, n) has k + offset in it.
        offset = mix(seed, epoch, _OFFSET) * 2.0**-63
        samples = self._owners(slots, offset)
        starts = np.where(samples > 0, self._bounds[samples - 1], 0.0)
        first = np.maximum(np.ceil(starts - offset), 0).astype(np.int64)
        # a sum may be rounded to the other side of a bound: what owns the slot decides
        first += self._owners(first, offset) < samples
        first -= (first > 0) & (self._owners(np.maximum(first - 1, 0), offset) == samples)
        return samples + (slots - first) * self.length

    def _copied(self, seed: int, epoch: int, start: int, stop: int, batch_size: int) -> NDArray[np.int64]:
        """The ids where a batch has its samples once, then all of them again.

        So rows that are mixed with each other are copies of two samples, where a batch has two.
        """
        if batch_size % self._copies:
            raise TaskError(
                f"batch_size={batch_size} is not a multiple of sampling()'s copies={self._copies}: choose one that is"
            )
        batches, within = np.divmod(np.arange(start, stop, dtype=np.int64), batch_size)
        copies, places = np.divmod(within, batch_size // self._copies)
        slots = batches * (batch_size // self._copies) + places
        if self._shuffle:
            slots = permute(slots, key=mix(seed, epoch), length=self.length)
        return slots + copies * self.length

    def _owners(self, slots: NDArray[np.int64], offset: float) -> NDArray[np.int64]:
        assert self._bounds is not None
        return np.minimum(np.searchsorted(self._bounds, slots + offset, side="right"), self._last)

    def _by_length(self, seed: int, epoch: int, window: int, batch_size: int) -> NDArray[np.int64]:
        """The ids of a window: batches of similar lengths, in random order; the short one stays the epoch's last."""
        assert self._lengths is not None
        start = window * self._window * batch_size
        ids = self._at(seed, epoch, start, min(start + self._window * batch_size, self.samples))
        by_length = np.argsort(self._lengths[ids % self.length], kind="stable")
        full, rest = divmod(len(ids), batch_size)
        key = mix(seed, epoch, _WINDOW, window)
        cut = key % (full + 1) * batch_size if rest else 0
        short = np.sort(by_length[cut : cut + rest])
        batches = np.concatenate([by_length[:cut], by_length[cut + rest :]]).reshape(full, batch_size)
        if full:
            batches = batches[permute(np.arange(full), key=key, length=full)]
        return ids[np.concatenate([np.sort(batches, axis=1).ravel(), short])]


def _column(name: str, values: Any, length: int) -> NDArray[Any]:
    column = np.asarray(values)
    if column.shape != (length,):
        raise TaskError(
            f"sampling(): {name} has shape {list(column.shape)}, and the training data {length} samples: give one "
            "for each sample"
        )
    return column


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


def samples_seen(step: int, length: int, batch_size: int) -> int:
    """Returns the position in the data after `step`: samples seen over all epochs, of `length` samples each."""
    epoch, within = divmod(step, -(-length // batch_size))
    return epoch * length + within * batch_size


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
    sampling: EpochOrder | None = None

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
