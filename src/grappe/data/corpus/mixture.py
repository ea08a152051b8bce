"""Defines Mixture: several datasets as one, of which each step draws by weights that may follow a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Dataset

from grappe.data.draw import mix, permute
from grappe.data.sampling import SampleOrder, samples_seen
from grappe.errors import TaskError

Weight = float | Mapping[int, float]
"""A share, relative to the others'; or shares by step, linear between them."""

_PERIOD = 1024
"""Samples, at most, in which each source has its share, up to one sample that the next periods make up for."""
_LEAST = 16  # samples of a period: fewer cost more than they smooth
_MIXTURE = 0x6D78  # a word of the key, so that it is no epoch's


class Mixture(Dataset[Any]):
    """Samples of several datasets, of each as often as its weight says, whatever their lengths.

    Each source is read in an order of its own: all of its samples once, then all once again. What a step draws is a
    function of the seed, the weights and the step alone.

    Args:
        weights: of each dataset its weight; `{0: 0.9, 1000: 0.5}` is 0.9 at step 0, 0.5 from step 1,000 on, linear
            between.
        samples: of an epoch; default: as many as all sources have. Steps times the batch size for a number of steps.
        names: of the sources, for the run and its report. Default: the names of their files or folders.

    Raises:
        TaskError: a weight is negative or no number, or all are 0 at a step.
    """

    def __init__(
        self, weights: Mapping[Any, Weight], *, samples: int | None = None, names: Sequence[str] | None = None
    ) -> None:
        self.sources = list(weights)
        default = [getattr(source, "name", "source") for source in self.sources]
        default = [f"{n} {i + 1}" if default.count(n) > 1 else n for i, n in enumerate(default)]
        self.names = list(names or default)
        if len(set(self.names)) != len(self.sources):
            raise TaskError(f"Mixture: {len(self.sources)} sources need as many different names=")
        self.weights: list[dict[int, float]] = []
        for name, weight in zip(self.names, weights.values(), strict=True):
            points = dict(sorted(weight.items())) if isinstance(weight, Mapping) else {0: weight}
            if not points or not all(np.isfinite(share) and share >= 0 for share in points.values()):
                raise TaskError(
                    f"Mixture: the weight of {name} is {weight}: give a number from 0 on, or {{step: number}}"
                )
            self.weights.append({int(step): float(share) for step, share in points.items()})
        if not self.sources or any(self._shares(step).sum() <= 0 for each in self.weights for step in each):
            raise TaskError("Mixture: at each step one source at least must have a weight above 0")
        self._lengths = np.array([len(source) for source in self.sources], np.int64)
        self._ends = np.cumsum(self._lengths)
        self.samples = samples or int(self._ends[-1])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        source, within = self._locate(index)
        return source[within]

    @property
    def keyed(self) -> bool:
        """Returns whether all sources are, so that threads may load samples."""
        return type(self) is Mixture and all(getattr(source, "keyed", False) is True for source in self.sources)

    def sample(self, index: int, key: int) -> Any:
        """Returns a sample as its key says."""
        source, within = self._locate(index)
        return source.sample(within, key)

    def memory(self) -> int:
        """Returns the bytes that a process takes at most for blocks of all sources."""
        return sum(source.memory() for source in self.sources if hasattr(source, "memory"))

    def epoch_order(self) -> MixedOrder:
        """Returns the order of what is drawn."""
        return MixedOrder(self)

    def _locate(self, index: int) -> tuple[Any, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[number], index - int(self._ends[number] - self._lengths[number])

    def _shares(self, step: int) -> NDArray[np.float64]:
        return np.array([np.interp(step, list(each), list(each.values())) for each in self.weights])


class MixedOrder:
    """The order of a mixture: a period has each source's share of them, permuted."""

    repeats = True

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self.length, self.samples = len(mixture), mixture.samples
        self._size = min(_PERIOD, max(_LEAST, mixture.samples // 64))  # of a short training too, weights follow steps
        self._orders = [getattr(source, "epoch_order", lambda: None)() for source in mixture.sources]
        self._drawn = [np.zeros(len(mixture.sources), np.int64)]  # of each source before each period
        self._laid = (0, -1, 0), np.empty(0, np.int64), np.empty(0, np.int64)  # the last period that was asked for
        self._due = np.zeros(len(mixture.sources))  # of each source, a part of a sample that is still to come

    @property
    def fingerprint(self) -> str:
        """A hash of weights, lengths and the sources' own orders."""
        parts = [self.samples, self._size, self._mixture.weights, self._mixture._lengths.tolist()]
        parts += [getattr(order, "fingerprint", "") for order in self._orders]
        return xxhash.xxh3_64_hexdigest(repr(parts).encode())

    def order(self, seed: int, epoch: int, start: int, stop: int, batch_size: int) -> NDArray[np.int64]:
        """Returns the ids at positions `start` to `stop` of an epoch; i + c N is sample i of N, read for time c."""
        periods, slots = np.divmod(epoch * self.samples + np.arange(start, stop, dtype=np.int64), self._size)
        ids = np.empty(stop - start, np.int64)
        for period in np.unique(periods).tolist():
            here = np.flatnonzero(periods == period)
            owners, ranks = (row[slots[here]] for row in self._period(seed, period, batch_size))
            for source in np.unique(owners).tolist():
                chosen = owners == source
                ids[here[chosen]] = self._of_source(source, seed, ranks[chosen])
        return ids

    def drawn(self, samples: int, seed: int, batch_size: int) -> dict[str, int]:
        """Counts what the first `samples` of a training are drawn from."""
        period, rest = divmod(samples, self._size)
        owners, _ = self._period(seed, period, batch_size)
        counts = self._counts(period, batch_size) + np.bincount(owners[:rest], minlength=len(self._orders))
        return dict(zip(self._mixture.names, counts.tolist(), strict=True))

    def _period(self, seed: int, period: int, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of each sample of a period, and its rank among all that are drawn from this source."""
        if self._laid[0] != (seed, period, batch_size):
            before, after = self._counts(period, batch_size), self._counts(period + 1, batch_size)
            slots = permute(np.arange(self._size, dtype=np.int64), key=mix(seed, _MIXTURE, period), length=self._size)
            owners = np.searchsorted(np.cumsum(after - before), slots, side="right")
            ranks = np.empty_like(owners)
            for source, first in enumerate(before.tolist()):
                chosen = np.flatnonzero(owners == source)
                ranks[chosen] = first + np.arange(len(chosen))
            self._laid = (seed, period, batch_size), owners, ranks
        return self._laid[1], self._laid[2]

    def _of_source(self, source: int, seed: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        length, order = int(self._mixture._lengths[source]), self._orders[source]
        times, positions = np.divmod(ranks, length)
        ids = np.empty_like(ranks)
        for time in np.unique(times).tolist():
            chosen = times == time
            if order is None:
                ids[chosen] = permute(positions[chosen], key=mix(seed, _MIXTURE, source, time), length=length)
            else:
                ids[chosen] = order.at(mix(seed, _MIXTURE, source), time, positions[chosen])
        return ids + int(self._mixture._ends[source]) - length + times * self.length

    def _counts(self, period: int, batch_size: int) -> NDArray[np.int64]:
        """Returns how many samples of each source come before a period."""
        steps_per_epoch = -(-self.samples // batch_size)
        while len(self._drawn) <= period:
            epoch, within = divmod((len(self._drawn) - 1) * self._size, self.samples)
            shares = self._mixture._shares(epoch * steps_per_epoch + within // batch_size)
            self._due += self._size * shares / shares.sum()
            counts = np.maximum(np.floor(self._due + 1e-9), 0).astype(np.int64)
            by_rest = np.argsort(counts - self._due, kind="stable")
            missing = self._size - int(counts.sum())
            if missing < 0:  # a source was one ahead, and has no share any more
                by_rest = by_rest[counts[by_rest] > 0][::-1]
            counts[by_rest[: abs(missing)]] += np.sign(missing)
            self._due -= counts
            self._drawn.append(self._drawn[-1] + counts)
        return self._drawn[period]


def drawn_from(order: SampleOrder, step: int) -> dict[str, int]:
    """Counts what the first steps of a training are drawn from, by the sources' names; none where it is no mixture."""
    if not isinstance(order.sampling, MixedOrder):
        return {}
    seen = samples_seen(step, order.length, order.batch_size)
    return order.sampling.drawn(seen, order.seed, order.batch_size)
