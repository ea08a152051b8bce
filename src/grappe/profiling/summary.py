"""Summary of one process's time: medians, means and totals by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grappe.profiling.phases import IN_A_STEP, PHASES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
    """Quartiles of the seconds per step: half of the steps lie between `low` and `high`."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Summary of one process's time."""

    clock: str
    """"host", or "device" if the phases of steps were timed by events on a GPU."""
    steps: int
    """Number of steps in the medians, without warm-up."""
    step: Quartiles
    """Seconds of whole steps, without evaluation and saving."""
    phases: Mapping[str, Quartiles]
    """Seconds by phase of a step."""
    means: Mapping[str, float]
    """Mean seconds by phase of a step, over the same steps; their sum is the mean step."""
    totals: Mapping[str, float]
    """Host seconds of the whole training by phase, with warm-up. On a GPU the host runs ahead of the device."""


def timing(clock: str, rows: Any, totals: Sequence[float]) -> StepTimes:
    """Summarises an array of steps, [steps, phases of a step], and total seconds by phase."""
    import numpy as np

    steps = len(rows)
    rows = rows if steps else np.zeros((1, len(IN_A_STEP)))
    return StepTimes(
        clock=clock,
        steps=steps,
        step=_quartiles(rows.sum(1)),
        phases={name: _quartiles(rows[:, place]) for place, name in enumerate(IN_A_STEP)},
        means={name: float(rows[:, place].mean()) for place, name in enumerate(IN_A_STEP)},
        totals=dict(zip(PHASES, totals, strict=True)),
    )


def duration(seconds: float) -> str:
    """Formats the seconds of a step: 0.24 ms, 12.3 ms, 1.25 s."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-4 else f"{1e3 * seconds:.2f} ms"


def _quartiles(values: Any) -> Quartiles:
    import numpy as np

    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return Quartiles(median=float(median), low=float(low), high=float(high))
