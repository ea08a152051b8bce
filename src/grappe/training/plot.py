"""Draws a run's curves as SVG: the loss and the metrics by step, for a notebook's cell and for a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grappe.errors.foreign_text import html_text

MOST = 3  # panels, and lines in each: the loss and the first two metrics
WIDTH, HEIGHT = 360, 220  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 26, 26  # margins
DETAIL = 180  # points of a line; what a saved notebook keeps of it
MARKED = 40  # points of a line that are shown as dots, too
LOGARITHMIC = 100.0  # highest / lowest value from which on the axis is logarithmic
LARGEST = 1e30  # a larger value is not drawn
GREY, COLOURS = "#808080", ("#4c8bc9", "#e07b39", "#3a9e6e", "#b56bc4")  # readable on white and on black
NOT_METRICS = ("kind", "step", "epoch", "samples", "count")
TRAINING = "training"

Points = list[tuple[float, float]]


class Plot:
    """Curves of a run. A notebook shows them; `save` writes them to a file.

    Args:
        records: of the run's curves, in order.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.caption = ""
        self._panels: dict[str, dict[str, Points]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a step or an evaluation; one of an earlier step replaces what came after it, as a resumed run does."""
        step, kind = record.get("step"), record.get("kind")
        if not isinstance(step, int) or kind not in ("step", "evaluation"):
            return
        split = TRAINING if kind == "step" else str(record.get("split", "validation"))
        for name, value in record.items():
            metric = name.removeprefix(f"{TRAINING}_")
            skipped = name in NOT_METRICS or (kind == "step" and name != "loss" and metric == name)
            if skipped or not isinstance(value, int | float) or not abs(value) < LARGEST:
                continue
            panel = _entry(self._panels, metric, {})
            line = [] if panel is None else _entry(panel, split if metric == name else TRAINING, [])
            while line and line[-1][0] >= step:
                line.pop()
            if line is not None:
                line.append((step, float(value)))

    def svg(self) -> str:
        """Returns the curves as the text of an SVG picture; "" without any."""
        panels = [_panel(name, lines, WIDTH * place) for place, (name, lines) in enumerate(self._panels.items())]
        if not panels:
            return ""
        width = WIDTH * len(panels)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
            f'style="max-width:100%" role="img" aria-label="curves of the run" font-family="sans-serif" font-size="11" '
            f'fill="{GREY}">{"".join(panels)}</svg>'
        )

    def save(self, file: Path | str) -> None:
        """Writes the picture to `file`, as SVG."""
        Path(file).write_text(self.svg(), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Plot({', '.join(map(repr, self._panels))})"

    def _repr_html_(self) -> str:
        return f"<div>{self.svg()}<div>{html_text(self.caption)}</div></div>"


def _entry(entries: dict[str, Any], name: str, new: Any) -> Any:
    """Returns an entry, which is `new` where there is none; None: there are MOST others already."""
    return entries.setdefault(name, new) if name in entries or len(entries) < MOST else None


def _panel(name: str, lines: Mapping[str, Points], left: int) -> str:
    steps, values = zip(*(point for line in lines.values() for point in line), strict=True)
    logarithmic = min(values) > 0 and max(values) >= LOGARITHMIC * min(values)
    scaled = math.log10 if logarithmic else float
    (first, last), (low, high) = _ends(*steps), _ends(*map(scaled, values))
    if logarithmic:
        marks = {place: f"{10**place:g}" for place in _ticks(low, high, integers=True)}
    else:
        marks = {place: f"{place:.6g}" for place in _ticks(low, high)}

    def x(step: float) -> float:
        return round(left + LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first), 1)

    def y(place: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (place - low) / (high - low), 1)

    ends = x(first), x(last)
    parts = [
        f'<path d="M{ends[0]} {y(place)}H{ends[1]}" stroke="{GREY}" stroke-opacity=".3"/>'
        f'<text x="{ends[0] - 6}" y="{y(place) + 4}" text-anchor="end">{mark}</text>'
        for place, mark in marks.items()
    ]
    for step in _ticks(first, last, integers=True):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - 8}" text-anchor="middle">{step:,.0f}</text>')
    legend = f'<tspan font-weight="bold">{html_text(name)}</tspan>'
    others = iter(COLOURS[1:])
    for label, line in lines.items():
        colour = COLOURS[0] if label == TRAINING else next(others)
        size = -(-len(line) // DETAIL)  # at most DETAIL points are drawn: the means of as many pieces
        pieces = [line[first : first + size] for first in range(0, len(line), size)]
        drawn = [(x(part[-1][0]), y(scaled(sum(value for _, value in part) / len(part)))) for part in pieces]
        corners = " ".join(f"{across},{down}" for across, down in drawn)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(drawn) <= MARKED:
            parts += [f'<circle cx="{across}" cy="{down}" r="2" fill="{colour}"/>' for across, down in drawn]
        legend += f'<tspan dx="10" fill="{colour}">{html_text(label)}</tspan>'
    return f'<text x="{ends[0]}" y="14">{legend}</text>{"".join(parts)}'


def _ends(*values: float) -> tuple[float, float]:
    """Returns the lowest and the highest value; some way apart, even if all are the same."""
    low, high = min(values), max(values)
    apart = max(abs(low), abs(high)) * 1e-3 or 1.0
    return (low, high) if high - low > apart else (low - apart, high + apart)


def _ticks(low: float, high: float, *, integers: bool = False) -> list[float]:
    """Returns about five round numbers between both ends; `integers`: whole numbers alone."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(part * power for part in (1, 2, 5, 10) if part * power >= rough)
    size = max(size, 1.0) if integers else size
    return [number * size for number in range(math.ceil(low / size), math.floor(high / size) + 1)]
