"""Interrupt: signals, and the end of the time that was given, set a flag, and do nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def handled() -> tuple[signal.Signals, ...]:
    """The signals that ask a training to save and end: SIGHUP not under nohup, which has it ignored."""
    return tuple(
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


SPARE_SECONDS = 5.0  # for the processes to leave, beyond what was measured
SPARE_SAVES = 2.0  # a save may take twice as long as the slowest so far


class Interrupt:
    """Remembers that a signal came, or that time is up; the step under way tells the other processes.

    Args:
        time_limit: seconds from now; None: Slurm's end time, if there is one.
    """

    def __init__(self, time_limit: float | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self._received = 0.0
        self._deadline: float | None = None
        if time_limit is not None:
            self._deadline = time.time() + time_limit
        elif environment.get("SLURM_JOB_END_TIME", "").isdigit():
            self._deadline = float(environment["SLURM_JOB_END_TIME"])
        self._step = self._saving = 0.0
        self._margin = SPARE_SECONDS

    def reserve(self, *, step: float = 0.0, saving: float = 0.0) -> None:
        """Learns from a step's or a save's seconds how long before the end to stop."""
        if step > self._step or saving > self._saving:
            self._step, self._saving = max(step, self._step), max(saving, self._saving)
            self._margin = SPARE_SECONDS + 2 * self._step + SPARE_SAVES * self._saving

    def install(self) -> None:
        """Handles the signals in this process, those that came while it started and were held back too."""
        for number in handled():
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = 1.0

    def flag(self) -> float:
        """1.0 once a signal came or time is up, else 0.0."""
        if self._deadline is not None and time.time() + self._margin > self._deadline:
            return 1.0
        return self._received
