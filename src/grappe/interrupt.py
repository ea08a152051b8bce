"""Interrupt: signals set a flag, and do nothing else."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Interrupt:
    """Remembers that a signal came; the step under way tells the other processes."""

    def __init__(self) -> None:
        self._received = 0.0

    def install(self) -> None:
        """Handles SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 in this process."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = 1.0

    def flag(self) -> float:
        """1.0 once a signal came, else 0.0."""
        return self._received
