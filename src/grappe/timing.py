"""Timing: what one process's time went into, as medians, means and totals by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grappe.phases import IN_A_STEP, PHASES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds a step: half of the steps lie between `low` and `high`."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One process's time."""

    clock: str
    """"host"; "device" where a GPU's events say what a step was made of."""
    steps: int
    """Steps that the medians are over; warm-up is left out."""
    step: Spread
    """Of whole steps, evaluation and saving left out."""
    phases: Mapping[str, Spread]
    """By phase of a step."""
    means: Mapping[str, float]
    """By phase of a step: mean seconds over the same steps; they add up to the mean step."""
    totals: Mapping[str, float]
    """By phase: host seconds of the whole training, warm-up too. On a GPU the host runs ahead of the device."""


def timing(clock: str, rows: Any, totals: Sequence[float]) -> Timing:
    """Of an array of steps, [steps, phases of a step], and seconds in all by phase."""
    import numpy as np

    steps = len(rows)
    rows = rows if steps else np.zeros((1, len(IN_A_STEP)))
    return Timing(
        clock=clock,
        steps=steps,
        step=_spread(rows.sum(1)),
        phases={name: _spread(rows[:, place]) for place, name in enumerate(IN_A_STEP)},
        means={name: float(rows[:, place].mean()) for place, name in enumerate(IN_A_STEP)},
        totals=dict(zip(PHASES, totals, strict=True)),
    )


def _spread(values: Any) -> Spread:
    import numpy as np

    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return Spread(median=float(median), low=float(low), high=float(high))
