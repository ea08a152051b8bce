"""Curve: the losses of one training whose learning rate rises, and their smoothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

WIDTH = 0.025
"""Standard deviation of the smoothing window, as a part of the ramp."""
DIVERGED = 3.0
"""A training ends when its loss is above the best by this many times the first."""
FIRST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One training's steps."""

    seed: int
    lr: tuple[float, ...]
    loss: tuple[float, ...]
    """Of the step's batch, before the update with the step's learning rate."""
    diverged: bool
    """Whether it ended before the ramp did."""


class Stop:
    """Says after each loss whether the training has diverged."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def __call__(self, loss: float) -> bool:
        before, self._losses = self._losses, [*self._losses, loss]
        if not math.isfinite(loss) or not before:
            return not math.isfinite(loss)
        first = abs(float(np.mean(before[:FIRST])))
        return loss > min(before) + DIVERGED * max(first, 1e-12)


def smoothed(values: Sequence[float], steps: int) -> np.ndarray:
    """Smooths by a Gaussian window centred on each value, so that nothing is shifted.

    An exponential moving average, which others use, lags: its steepest point is at too high a learning rate.

    Args:
        steps: of the whole ramp.
    """
    width = max(1.0, WIDTH * steps)
    places = np.arange(len(values))
    weights = np.exp(-0.5 * ((places[:, None] - places[None]) / width) ** 2)
    return weights @ np.asarray(values, dtype=float) / weights.sum(1)


def noise(values: Sequence[float], steps: int) -> float:
    """The standard error of the smoothed values, from how far neighbours differ before anything is learned."""
    early = np.asarray(values[: max(8, steps // 5)], dtype=float)
    scatter = float(np.median(np.abs(np.diff(early)))) / (0.6745 * math.sqrt(2)) if len(early) > 1 else 0.0
    return scatter / math.sqrt(2 * math.sqrt(math.pi) * max(1.0, WIDTH * steps))
