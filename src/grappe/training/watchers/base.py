"""Watcher, the base class of callbacks, and the data that callbacks get: RunInfo, Record, Outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from grappe.profiling.chronometer import Chronometer, StepTimes
    from grappe.step.scores import Scores
    from grappe.training.headspace import Headspace


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a training, known when it begins. Steps are optimizer steps, counted over the whole world."""

    folder: Path
    """The run's folder."""
    task: str
    """The task's name, as the user wrote it."""
    plan: str
    """The plan's text; "" for one process."""
    engine: str
    """The plan's engine."""
    rank: int
    """Rank of the watcher's process."""
    world_size: int
    device: str
    """"cpu" or "cuda"."""
    start: int
    """Number of steps already done: 0, or the step of the checkpoint that the training resumes from."""
    last_step: int
    """The last step of this start of the training, if nothing stops it earlier."""
    total_steps: int
    """Number of steps of the whole training; more than `last_step` if --steps ends this start earlier."""
    steps_per_epoch: int
    batch_size: int
    """Number of samples per step."""
    samples: int
    """Number of training samples."""
    description: Mapping[str, Any]
    """The content of run.json: fields of the task, versions, host."""


class Record(NamedTuple):
    """Record of one optimizer step, with numbers read from the device. Steps count from 1, over the whole world."""

    step: int
    epoch: int
    samples: int
    """Number of samples seen since the training began."""
    loss: float
    """Mean loss over the global batch."""
    lr: float
    seconds: float
    """Wall time since the step before, without evaluation and saving."""
    norm: float | None
    """The gradient's norm before clipping; None if nothing needs the norm."""
    skipped: bool
    """Whether an fp16 overflow skipped the update."""
    flag: float
    """Number of processes that requested a stop."""
    metrics: Mapping[str, float | list[float]] = {}
    """Values after each `print_every` steps: training_NAME of each named loss, and of each metric if --training-metrics
    is given, over the training batches since the last evaluation."""
    data: float = 0.0
    """Seconds of the step in which process 0 waited for its samples."""
    device: float | None = None
    """Seconds of the step in which process 0 computed: forward, backward and update; None on a GPU, which computes
    while the host goes on: run.json has its times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a training."""

    status: str
    """"finished", "stopped" (patience), "paused" (--steps) or "interrupted" (a signal or the time limit)."""
    step: int
    scores: Scores | None
    """Scores of the last evaluation."""
    timing: StepTimes
    """Summary of this process's time."""
    headspace: Headspace
    """Cost of waiting for data."""
    bottleneck: str = ""
    """Cause that slowed the training down most, and the change that helps; "": nothing stands out."""
    peaks: Sequence[Mapping[str, int]] = ()
    """By rank: peak bytes ("host", "device"), and bytes of parameters, gradients and optimizer state."""
    remarks: Sequence[str] = ()
    """The engine's remarks on the plan's execution."""
    limited_validation: str = ""
    """Estimate of what an evaluation of all batches would take, where `validation_batches` leaves some out."""


class Watcher:
    """Base class of watchers (callbacks): override the methods that you need.

    To use a watcher: `grappe.train(..., watchers=[MyWatcher()])`, or `grappe train ... --callback file.py:MyWatcher`,
    which makes it without arguments. A watcher runs on process 0 only, under every plan, as a pickled copy: values that
    the copy keeps in attributes are lost at the end, so write results to a file. An exception ends the
    training.
    """

    prompt: ClassVar[bool] = False
    """Whether `stepped` is called after each step. If False, it is called for groups of steps, in order, at least ten
    times a second if steps are quicker, and always before an evaluation, a save and the end."""

    def started(self, info: RunInfo) -> None:
        """Called before the first step."""

    def stepped(self, record: Record) -> None:
        """Called after a step: one step late, when its numbers are ready; before an evaluation or a save, at once."""

    def gradients_ready(self, step: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Called when the gradients of `step` are ready (and clipped, if the task clips), before the optimizer's step.

        This callback costs time in every step, and is connected only if a watcher overrides it.

        Args:
            parameters: this process's parameters by name; of a sharded model, its part. `.grad` may be None.
        """

    def checked(self, step: int, finding: str) -> None:
        """Called after a step that was computed once more as one process does, with what there is to say of it."""

    def noted(self, step: int, bottleneck: str) -> None:
        """Called once after some hundred steps, with the cause that slows the training down most."""

    def evaluated(self, step: int, scores: Scores) -> None:
        """Called after an evaluation, which follows `step`."""

    def saving(self, step: int) -> None:
        """Called before a checkpoint of `step` is written."""

    def failed_to_save(self, problem: str) -> None:
        """Called when a checkpoint could not be written and the training continues."""

    def ended(self, outcome: Outcome | None) -> None:
        """Called at the end of the training; `outcome` is None after an error."""


class ClockWatcher(Watcher):
    """A watcher of grappe's own that reads the process's clock of phases."""

    chronometer: Chronometer
    """Set before the training starts."""
