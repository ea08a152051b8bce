"""Draws the curves in the terminal: a dot for each seed's smoothed loss, a line for each end of the band."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grappe.verbs.lr_find.curve import smoothed
from grappe.verbs.lr_find.lr_find import Found

COLUMNS, ROWS = 64, 14
DOTS = "•×+∘"


def plot(found: Found) -> Iterator[str]:
    """Lines of text: the loss over the learning rate."""
    low, high = found.ramp.ends(found.own)
    logarithmic = found.ramp.kind == "exponential"

    def column(rate: float) -> int:
        part = math.log(rate / low) / math.log(high / low) if logarithmic else (rate - low) / (high - low)
        return min(COLUMNS - 1, max(0, round(part * (COLUMNS - 1))))

    curves = [(curve.lr, smoothed(curve.loss, found.ramp.steps)) for curve in found.curves if curve.loss]
    if not curves:
        return
    bottom = min(float(values.min()) for _, values in curves)
    top = max(float(values[: max(3, len(values) // 10)].max()) for _, values in curves)
    top += 0.15 * (top - bottom) or 1.0
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    if found.advice.band is not None:
        for rate in (found.advice.band.steepest, found.advice.band.largest_stable):
            for line in grid:
                line[column(rate)] = "│"
    for number, (rates, values) in enumerate(curves):
        for rate, value in zip(rates, values, strict=True):
            if value <= top:
                row = round((top - float(value)) / (top - bottom) * (ROWS - 1))
                grid[row][column(rate)] = DOTS[number % len(DOTS)]
    for row, line in enumerate(grid):
        value = top - (top - bottom) * row / (ROWS - 1)
        label = f"{value:.4g}" if row % 4 == 0 or row == ROWS - 1 else ""
        yield f"{label:>9} ┤{''.join(line).rstrip()}"
    yield f"{'':>9} └{'─' * COLUMNS}"
    ends, space = (f"{low:.2g}", f"{high:.2g}"), COLUMNS
    yield f"{'':>10} {ends[0]}{'learning rate':^{space - len(ends[0]) - len(ends[1])}}{ends[1]}"
