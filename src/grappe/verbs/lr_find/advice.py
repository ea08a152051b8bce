"""Loss curves over a rising learning rate, and the advice that follows from them: a band, or why there is none."""

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
SURE = 6.0
"""Standard errors that the loss must fall by."""
RISE = 0.1
"""Of the fall: how far the loss may rise again before it counts as unstable."""
SPREAD = 10.0
"""How far apart the seeds' learning rates may be."""
SHORT = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCurve:
    """One training's steps."""

    seed: int
    lr: tuple[float, ...]
    loss: tuple[float, ...]
    """Of the step's batch, before the update with the step's learning rate."""
    diverged: bool
    """Whether it ended before the ramp did."""


class DivergenceTest:
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
        steps: of the full ramp.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """Two learning rates."""

    steepest: float
    """The learning rate where the loss falls fastest."""
    largest_stable: float
    """Beyond it the loss rises again."""
    reaches_the_end: bool
    """Whether the ramp ended before that."""

    @property
    def suggested(self) -> float:
        """The middle, by ratio."""
        return math.sqrt(self.steepest * self.largest_stable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A band, or why there is none."""

    band: Band | None
    reason: str
    """Empty where there is a band."""


def advise(curves: Sequence[LossCurve], steps: int) -> Advice:
    """The band of all seeds together: the median of the steepest, the least of the largest stable.

    Args:
        steps: of the full ramp.
    """
    bands = []
    for curve in curves:
        band = band_of(curve, steps)
        if isinstance(band, str):
            return Advice(band=None, reason=f"seed {curve.seed}: {band}")
        bands.append(band)
    for name in ("steepest", "largest_stable"):
        values = [getattr(band, name) for band in bands]
        if max(values) > SPREAD * min(values):
            what = name.replace("_", " ")
            return Advice(
                band=None,
                reason=f"the seeds disagree: their {what} learning rates are {min(values):.2g} to {max(values):.2g}. "
                "Give more --steps, or a larger batch_size",
            )
    stable = min(band.largest_stable for band in bands)
    steepest = min(float(np.median([band.steepest for band in bands])), stable)
    reaches = all(band.reaches_the_end for band in bands)
    return Advice(band=Band(steepest=steepest, largest_stable=stable, reaches_the_end=reaches), reason="")


def band_of(curve: LossCurve, steps: int) -> Band | str:
    """One seed's band, or why it has none."""
    if len(curve.loss) < SHORT:
        lowest = curve.lr[0] if curve.lr else 0.0
        return f"it diverged within {len(curve.loss)} steps, from lr={lowest:.2g} on: give a smaller --lowest"
    values = smoothed(curve.loss, steps)
    below = np.minimum.accumulate(values)
    start = float(values[: max(3, steps // 10)].mean())
    fall = start - float(below[-1])
    if fall <= SURE * noise(curve.loss, steps) or fall <= 1e-3 * abs(start):
        end = "it diverged" if curve.diverged else "the ramp ended"
        return (
            f"the loss does not fall beyond its noise before {end} (from {start:.4g} to {below[-1]:.4g}). "
            + (
                "Give a smaller --lowest, more --steps"
                if curve.diverged
                else "Give a larger --highest, more --steps"
            )
            + ", or a larger batch_size"
        )
    risen = np.flatnonzero(values > below + RISE * (start - below) + SURE * noise(curve.loss, steps))
    # What rises before anything is learned is noise.
    risen = risen[start - below[risen] > 0.5 * fall]
    end = int(risen[0]) if len(risen) else len(values)
    lowest = int(np.argmin(values[:end]))
    slopes = np.gradient(values)
    steepest = int(np.argmin(slopes[: lowest + 1]))
    return Band(
        steepest=curve.lr[steepest],
        largest_stable=curve.lr[lowest],
        reaches_the_end=not len(risen) and not curve.diverged,
    )
