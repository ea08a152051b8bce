"""Live curves: shows a training's curves in the notebook's cell that started it, and leaves the last picture there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from grappe.errors.foreign_text import number
from grappe.training.plot import Plot
from grappe.training.run import METRICS
from grappe.verbs.follow import Tail
from grappe.words import count_of, format_number

SECONDS = 1.0  # between two pictures


class LiveCurves:
    """The picture in the cell, which each call draws again if a second has passed."""

    def __init__(self, folder: Path, processes: int) -> None:
        from IPython.display import display  # pyrefly: ignore

        self._tail, self._plot = Tail(folder / METRICS), Plot()
        self._plot.caption = f"starting {count_of(processes, 'process')} …"
        self._drawn = time.monotonic()
        self._handle: Any = display(self._plot, display_id=True)

    def __call__(self) -> None:
        if time.monotonic() - self._drawn >= SECONDS:
            self._drawn = time.monotonic()
            self._update()

    def end(self) -> None:
        """Draws the last picture, without words."""
        self._update(ended=True)

    def _update(self, *, ended: bool = False) -> None:
        """Draws what is new."""
        with contextlib.suppress(Exception):  # a file that cannot be read now, a notebook that was closed
            records = list(self._tail.new())
            for record in records:
                self._plot.add(record)
            last = next((record for record in reversed(records) if record.get("kind") == "step"), None)
            if last is not None:
                epoch, loss = number(last.get("epoch")) + 1, format_number(number(last.get("loss")))
                self._plot.caption = f"epoch {epoch:.0f}, step {last.get('step')}, loss {loss}"
            if ended:
                self._plot.caption = ""
            if records or ended:
                self._handle.update(self._plot)
