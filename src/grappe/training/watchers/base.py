"""Watcher, the base class of callbacks, and what a training says to them: RunInfo, Record, Outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from grappe.profiling.summary import StepTimes
    from grappe.step.scores import Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known of a training when it begins. Steps are optimizer steps, counted over the whole world."""

    folder: Path
    """The run's."""
    task: str
    """As the user named it."""
    plan: str
    """The plan's text; "" for one process."""
    engine: str
    """The plan's."""
    rank: int
    """Of the process that this watcher lives on."""
    world_size: int
    device: str
    """"cpu" or "cuda"."""
    start: int
    """Steps already done: 0, or those of the checkpoint that the training resumes from."""
    last_step: int
    """The step after which this start of the training ends, if nothing stops it before."""
    total_steps: int
    """Of the whole training; more than `last_step` where --steps ends it sooner."""
    steps_per_epoch: int
    batch_size: int
    """Samples per step."""
    samples: int
    """Of the training data."""
    description: Mapping[str, Any]
    """What run.json says: fields of the task, versions, host."""


class Record(NamedTuple):
    """One optimizer step, its numbers read from the device. Steps count from 1, over the whole world."""

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
    """The gradient's norm before clipping; None where nothing needs it."""
    skipped: bool
    """An fp16 overflow: nothing was learned."""
    flag: float
    """How many processes asked to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended."""

    status: str
    """"finished", "stopped" (patience), "paused" (--steps) or "interrupted" (a signal or the time limit)."""
    step: int
    scores: Scores | None
    """Of the last evaluation."""
    timing: StepTimes
    """Where this process's time went."""
    peaks: Sequence[Mapping[str, int]] = ()
    """By rank: bytes at most ("host", "device"), and those of parameters, gradients and optimizer state."""
    remarks: Sequence[str] = ()
    """What the engine says of how the plan was carried out."""


class Watcher:
    """Base class of watchers (callbacks): override the methods you need, each may be left out.

    A watcher of your own: `grappe.train(..., watchers=[MyWatcher()])`, or `grappe train ... --watch file.py:MyWatcher`,
    which makes it without arguments. It lives on process 0 alone, whatever the plan. It travels there by value: what
    it keeps in its attributes stays there, so write down what you want to see afterwards. An exception ends the
    training.
    """

    prompt: ClassVar[bool] = False
    """Whether `stepped` is called after each step. Else it is called for groups of steps, in order, at least ten
    times a second where steps are quicker, and always before an evaluation, a save and the end."""

    def started(self, info: RunInfo) -> None:
        """The first step is about to be taken."""

    def stepped(self, record: Record) -> None:
        """A step is over. One step late, when the device has its numbers; at once before an evaluation or a save."""

    def gradients_ready(self, step: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """The gradients of `step` are there, clipped where the task clips; the optimizer is about to use them.

        Costs time in every step: connected only where a watcher overrides it.

        Args:
            parameters: this process's, by name; of a sharded model its part. `.grad` may be None.
        """

    def evaluated(self, step: int, scores: Scores) -> None:
        """An evaluation after `step` is over."""

    def saving(self, step: int) -> None:
        """A checkpoint of `step` is about to be written."""

    def failed_to_save(self, problem: str) -> None:
        """A checkpoint could not be written; the training goes on."""

    def ended(self, outcome: Outcome | None) -> None:
        """The training is over; None: by an error."""


def as_json(value: float | None) -> Any:
    """A number as JSON has it: infinities and NaN become null."""
    return value if value is not None and value - value == 0 else None
