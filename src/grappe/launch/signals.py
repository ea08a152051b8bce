"""Signals: the command forwards them to its processes; a training remembers them, saves and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from grappe.launch.terminal import complain

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SPARE_SECONDS = 5.0  # for the processes to leave, beyond what was measured
SPARE_SAVES = 2.0  # a save may take twice as long as the slowest so far


def handled() -> tuple[signal.Signals, ...]:
    """Returns the signals on which a training saves and ends; SIGHUP not under nohup, which ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or not ignored)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Context in which SIGNALS are blocked, also in processes started inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_as_programs_do(numbers: Sequence[int] | None = None) -> None:
    """Gives signals their usual effect in this process and in those that it starts, as a user's program expects.

    A pool of multiprocessing's ends its workers by SIGTERM, and would wait for ever where that is blocked.

    Args:
        numbers: the signals; None: all that a training handles.
    """
    for number in handled() if numbers is None else numbers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS if numbers is None else numbers)


SAVE = -(2.0**-20)
"""A flag that any process's 1.0 outweighs, also in a mean over processes and in half precision."""


class StopSignal:
    """Remembers a signal or the end of the time limit; the running step informs the other processes.

    Each step reads `flag`, so it is an attribute.

    Args:
        time_limit: seconds from now; None: until Slurm's end time, if there is one.
    """

    flag = 0.0
    """1.0 after a signal or the end of the time limit; SAVE where a checkpoint is asked for."""
    _stops = False

    def __init__(self, time_limit: float | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self.deadline: float | None = None
        """The end of the time limit or of the job, as time.time has it; None: there is none."""
        if time_limit is not None:
            self.deadline = time.time() + time_limit
        elif environment.get("SLURM_JOB_END_TIME", "").isdigit():
            self.deadline = float(environment["SLURM_JOB_END_TIME"])
        self._step = self._saving = 0.0
        self._margin = SPARE_SECONDS

    def reserve(self, *, step: float = 0.0, saving: float = 0.0) -> None:
        """Records a step's or a save's seconds, from which the time reserved before the end follows."""
        if step > self._step or saving > self._saving:
            self._step, self._saving = max(step, self._step), max(saving, self._saving)
            self._margin = SPARE_SECONDS + 2 * self._step + SPARE_SAVES * self._saving

    def install(self, numbers: Sequence[int] | None = None) -> None:
        """Installs the signal handlers in this process; blocked signals from its start are then delivered.

        Args:
            numbers: the signals; None: all.
        """
        for number in handled() if numbers is None else numbers:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stops, self.flag = True, 1.0

    def ask_to_save(self, asks: bool) -> None:
        """Asks all processes to save after a step, or no longer; a signal that comes meanwhile is kept."""
        self.flag = SAVE if asks else 0.0
        if self._stops:
            self.flag = 1.0

    def check_time(self) -> None:
        """Sets the flag if the time limit ends before a further step and a save have ended."""
        if self.deadline is not None and time.time() + self._margin > self.deadline:
            self._stops, self.flag = True, 1.0


def _end_by_sigterm() -> None:
    # A pool that the user's code opens ends its workers by SIGTERM, and would wait for ever if they only noted it.
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopSignal):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_by_sigterm)


class Signalled(Protocol):
    """A process that can receive signals."""

    def signal(self, number: int) -> None:
        """Sends `number` to the process."""


class _EndAtOnce(BaseException):
    """Raised by a signal that ends all processes at once."""


class SignalForwarding:
    """Forwards the command's signals to its processes while they run.

    The first signal goes to processes that save and end; a second Ctrl-C, or any signal to processes that
    have nothing to save, ends them at once, and then has its usual effect on the command.
    """

    def __init__(self, *, saves: bool) -> None:
        self.processes: list[Signalled] = []
        self._saves = saves
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        self.over = self._ends = False

    def __enter__(self) -> SignalForwarding:
        # Only the main thread may handle signals in Python (not a notebook's worker thread).
        with contextlib.suppress(ValueError):
            for number in handled():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        if self.over:
            return
        if not self._saves or self._received.count(signal.SIGINT) > 1:
            self.over = self._ends = True
            # Python drops what is raised in a finalizer or a weak reference's callback: whoever waits for the
            # processes wakes by their end then.
            self.send(signal.SIGKILL)
            raise _EndAtOnce
        if number == signal.SIGINT and sys.stderr.isatty():
            with contextlib.suppress(OSError, RuntimeError):  # the signal may have come within a write
                complain("stopping and saving; press Ctrl-C again to end at once")
        self.send(number)

    def send(self, number: int) -> None:
        """Sends a signal to all processes."""
        for process in self.processes:
            process.signal(number)

    @property
    def received(self) -> bool:
        """Returns whether a signal has come."""
        return bool(self._received)

    def catch_up(self, process: Signalled) -> None:
        """Sends a new process the signals that came before it started."""
        for number in self._received:
            process.signal(number)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._ends:
            signal.raise_signal(self._received[-1])
            raise KeyboardInterrupt from None
