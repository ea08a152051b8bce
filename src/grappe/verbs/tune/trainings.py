"""Trainings: what the coordinator asks of whatever trains its trials, this machine's processes or Slurm's jobs."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from grappe.errors import GrappeError
from grappe.training.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a trial's training."""

    number: int
    how: Literal["trained", "killed", "stopped", "failed", "error"]
    """trained: as far as it was to be; killed: from outside, or interrupted by somebody else; stopped: at the time
    limit; failed: by its fields; error: by the machine, which stops the study."""
    reason: str = ""
    error: GrappeError | None = None


class Busy(Exception):
    """A training cannot be started now; the message says why. It is tried again."""


class Trainings(Protocol):
    """Trains some trials at a time."""

    @property
    def running(self) -> frozenset[int]:
        """The trials that are being trained, by number."""

    @property
    def stopping(self) -> bool:
        """True if a signal has come: nothing new is to be started."""

    @property
    def notes(self) -> str:
        """Note for the user about the trainings now; "": nothing."""

    def start(self, number: int, request: Request) -> None:
        """Starts a trial's training.

        Raises:
            Busy: not now.
            GrappeError: this cannot be started here, whatever the trial's fields.
        """

    def look(self, seconds: float) -> list[Ended]:
        """Waits until something happens, but at most `seconds`; returns the trainings that have ended."""
        ...

    def interrupt(self) -> None:
        """Stops the trainings at a checkpoint, if they end with this command."""

    def __enter__(self) -> Trainings: ...

    def __exit__(self, *error: object) -> None: ...
