"""Meter: says how far a long walk over images or bytes is, at what rate, and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from grappe.launch.terminal import progress

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0
_BAR = 24  # characters


class Meter:
    """A line on standard error, written anew as images are done; in a log, a line every ten seconds."""

    def __init__(
        self, verb: str, total: int, show: Callable[[str], None] = progress, unit: str = "images"
    ) -> None:
        self._verb, self._total, self._show, self._unit = verb, total, show, unit
        self._began = self._shown = time.monotonic()
        self._pause = _TERMINAL_SECONDS if sys.stderr.isatty() else _LOG_SECONDS

    def at(self, done: int, note: str = "") -> None:
        """Tells that `done` of them are done."""
        now = time.monotonic()
        if now - self._shown < self._pause:
            return
        self._shown = now
        rate = done / (now - self._began)
        left = (self._total - done) / rate if rate else 0.0
        share = done / self._total
        bar = "#" * round(share * _BAR)
        self._show(
            f"{self._verb} [{bar:<{_BAR}}] {done:,} of {self._total:,} {self._unit}, "
            f"{rate:,.0f}/s, {_spoken(left)} left" + (f", {note}" if note else "")
        )

    def end(self) -> None:
        """Takes the line away."""
        self._show("")


class Ticker:
    """Passes on words about a walk of unknown length, no oftener than anyone can read."""

    def __init__(self, show: Callable[[str], None] = progress) -> None:
        self._show = show
        self._pause = _TERMINAL_SECONDS if sys.stderr.isatty() else _LOG_SECONDS
        self._shown = time.monotonic()

    def __call__(self, words: str) -> None:
        """Shows `words`, unless others were shown a moment ago."""
        now = time.monotonic()
        if now - self._shown >= self._pause:
            self._shown = now
            self._show(words)


def _spoken(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
