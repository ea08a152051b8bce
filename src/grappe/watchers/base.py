"""Watcher: something that looks at a training from outside, behind each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from grappe.scores import Scores
    from grappe.timing import Timing
    from grappe.training import Training


class Record(NamedTuple):
    """One optimizer step, settled: its numbers are on the host. Steps count from 1, over the whole world."""

    step: int
    epoch: int
    samples: int
    """Samples seen since the training began."""
    loss: float
    """Mean over the global batch."""
    lr: float
    seconds: float
    """Wall time from the step before to this one, evaluation and saving left out."""
    norm: float | None
    skipped: bool
    flag: float
    """How many processes asked to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended."""

    status: str
    """"finished", "stopped" (patience), "paused" (--steps) or "interrupted" (a signal or the time limit)."""
    step: int
    scores: Scores | None
    timing: Timing
    """Where this process's time went."""
    peaks: Sequence[Mapping[str, int]] = ()
    """By process: its `memory.peak`, and what it held of parameters, gradients and optimizer state."""


class Watcher:
    """Looks at a training; every method may stay as it is. Lives on process 0."""

    def started(self, training: Training) -> None:
        """The first step is about to be taken."""

    def stepped(self, record: Record) -> None:
        """A step is settled: one step late, or at once before an evaluation, a save or a stop."""

    def evaluated(self, step: int, scores: Scores) -> None:
        """An evaluation has ended."""

    def saved(self, step: int) -> None:
        """A checkpoint is committed."""

    def failed_to_save(self, problem: str) -> None:
        """A checkpoint could not be written; the training goes on."""

    def ended(self, outcome: Outcome | None) -> None:
        """The training is over; None: by an error."""


def as_json(value: float | None) -> Any:
    """A number as JSON has it: infinities and NaN become null."""
    return value if value is not None and value - value == 0 else None
