"""Interrupt: signals set a flag, and do nothing else."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def handled() -> tuple[signal.Signals, ...]:
    """The signals that ask a training to save and end: SIGHUP not under nohup, which has it ignored."""
    return tuple(
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


class Interrupt:
    """Remembers that a signal came; the step under way tells the other processes."""

    def __init__(self) -> None:
        self._received = 0.0

    def install(self) -> None:
        """Handles the signals in this process, those that came while it started and were held back too."""
        for number in handled():
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = 1.0

    def flag(self) -> float:
        """1.0 once a signal came, else 0.0."""
        return self._received
