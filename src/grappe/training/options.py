"""Options of a training: evaluation, saving, logging and stopping, for Python and the command line; needs no torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from grappe.errors import UsageError
from grappe.fields import CountOrPart, Duration, DurationOrNone, Names, Part, Ranks, at_least

LONGEST_NOTE = 500  # characters

SAVE_SECONDS = 60.0
"""Seconds between checkpoints, where the user does not say when to save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of evaluation, saving, logging and stopping; none changes the learned weights,
    except evaluate_every where the schedule is a ReduceLROnPlateau.

    `grappe train` has an option for each field, with the docstring under the field as its help.
    """

    evaluate_every: int | None = None
    """Steps between evaluations. Default: each epoch."""
    validation_batches: int | None = None
    """Evaluate on this number of validation batches only; the time of an evaluation of all is then estimated."""
    save_every: int | None = None
    """Steps between checkpoints. Default: each epoch and minute, as far as a twentieth of the time allows."""
    patience: int | None = None
    """Early stopping: stop after this number of evaluations without a lower loss."""
    steps: int | None = None
    """Stop after this number of steps in total."""
    part: Part | None = None
    """Stop after this part of all steps: 0.5, 1/9. The same command without it trains the rest."""
    keep: int = 3
    """Number of newest checkpoints to keep in addition to the best."""
    time_limit: Duration | None = None
    """Save and stop before this time is over: seconds, 30m, 2h, 02:30:00. Default: Slurm's end time."""
    stall_limit: Duration | None = None
    """Abort when no step, evaluated batch or save ends in this time: seconds, 5m. Default: derived from the steps."""
    idle: DurationOrNone = 0.0
    """Save and end, with exit code 75, when no process has computed anything for this time: 30m. Default: none."""
    restarts: int = 0
    """Start again from the last checkpoint, in the same command, after a process was killed from outside: this number
    of times. Default: never, as whoever killed it may mean it to end. A Slurm job does it by itself."""
    stop_on_failed_save: bool = False
    """Abort when a checkpoint cannot be written."""
    training_metrics: bool = False
    """Compute the metrics over training batches, too. Each evaluation, and --print-every, shows training_NAME over the
    batches since the evaluation before."""
    no_check: bool = False
    """Do not compare the first step, and occasional later ones, with one process's steps."""
    noise_scale: bool = False
    """Measure the gradient noise scale: how large a batch is worth its samples."""
    log_samples: bool = False
    """Write the sample ids of each step and evaluation to the run's samples folder."""
    print_every: CountOrPart | None = None
    """Steps, or the part of an epoch (0.1), between lines of training loss and metrics. Default: each evaluation."""
    log: Names = ()
    """Loggers, in addition to the run's curves: tensorboard, wandb (offline), mlflow."""
    tag: Names = ()
    """Tags of the run, which grappe runs --tag selects: baseline,ablation."""
    note: str = ""
    """A sentence about the run, for grappe runs RUN and grappe report."""
    profile: Ranks = ()
    """Ranks whose processes profile a few steps: 0, or 0,3."""
    profile_steps: int = 5
    """Number of steps to profile."""
    profile_after: int | None = None
    """Step after which the profile begins. Default: the warm-up."""
    steps_only: bool = False
    """Only take steps, also beyond the task's epochs; no evaluation, no saving. For measurements."""

    def __post_init__(self) -> None:
        counts = "evaluate_every save_every patience steps keep profile_steps profile_after validation_batches"
        at_least(self, 1, *counts.split())
        at_least(self, 0, "restarts")
        for tag in self.tag:
            check_label("--tag", tag)
        if len(self.note) > LONGEST_NOTE or not self.note.isprintable():
            raise UsageError(f"--note: give one line of at most {LONGEST_NOTE} characters")
        every = self.print_every
        if every is not None and not (0 < every < 1 or every == int(every) > 0):
            raise UsageError(f"--print-every={every}: give steps, or a part of an epoch: 50, 0.1")

    def last_step(self, total: int) -> int:
        """Returns the step at which a training of `total` steps stops."""
        last = min(total, self.steps or total)
        # - 1e-6: 1/9 * 9 may round up to the next step.
        return last if self.part is None else max(1, math.ceil(self.part * last - 1e-6))

    def evaluations_every(self, steps_per_epoch: int) -> int | None:
        """Returns the number of steps between evaluations; None: there are none."""
        return None if self.steps_only else self.evaluate_every or steps_per_epoch

    def printing(self, steps_per_epoch: int) -> Callable[[int], bool] | None:
        """Returns the function that says whether a line follows a step, which counts from 1; None: there are none."""
        every = self.print_every
        if every is None:
            return None
        if every >= 1:
            return lambda step: step % every == 0
        every = max(every, 1 / steps_per_epoch)  # each step, if it is a smaller part
        # A part's multiples, in each epoch; 1e-9, as 1 // 0.1 is 9.
        lines = [int(step / steps_per_epoch / every + 1e-9) for step in range(steps_per_epoch + 1)]
        return lambda step: lines[(step - 1) % steps_per_epoch + 1] > lines[(step - 1) % steps_per_epoch]

    def saves_every(self, steps_per_epoch: int) -> int | None:
        """Returns the number of steps between checkpoints; None: there are none but at a stop."""
        return None if self.steps_only else self.save_every or steps_per_epoch


def check_label(option: str, text: str) -> None:
    """Refuses a name or tag that could not be typed and shown.

    Raises:
        UsageError: it is empty or long, or has other characters than letters, digits and spaces, or . _ - + =.
    """
    if not re.fullmatch(r"[\w.+=-]([\w.+= -]{0,58}[\w.+=-])?", text):
        raise UsageError(f"{option}={text}: give at most 60 letters, digits, spaces and . _ - + =")


def occasions_left(step: int, last: int, every: int | None) -> int:
    """Counts the evaluations, or the saves, after `step`: one each `every` steps, and one at the last step."""
    if every is None or step >= last:
        return 0
    return last // every - step // every + (last % every > 0)


def option_words(options: Options) -> list[str]:
    """Returns the words of the command line for `options`, without those that have their defaults."""
    words = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        name = f"--{field.name.replace('_', '-')}"
        if value is True:
            words.append(name)
        else:
            words += [name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words
