"""Figures: medians with quartiles, markdown tables, and what the machine was doing meanwhile."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The middle of several figures, and between which values half of them lie."""

    median: float
    low: float
    high: float
    count: int

    @property
    def error(self) -> float:
        """Half the width of the median's 95 % interval (McGill, Tukey and Larsen 1978, "Variations of box plots")."""
        return 1.57 * (self.high - self.low) / math.sqrt(self.count)

    def text(self, form: str) -> str:
        """`median (low to high)`, each in a format as `str.format` has them."""
        return f"{form.format(self.median)} ({form.format(self.low)} to {form.format(self.high)})"


def spread(values: Sequence[float]) -> Quartiles:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Quartiles(median=values[0], low=values[0], high=values[0], count=1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median=median, low=low, high=high, count=len(values))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine() -> str:
    """One line on this machine and this moment; the load average counts other programs too."""
    import torch

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores {platform.machine()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, load average {load}"
    )
