"""Options: how a training is watched and when it stops, for Python and the command line; needs no torch."""

from __future__ import annotations

import dataclasses

from grappe.fields import Duration, Names, Ranks, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a training is watched and when it stops; none of it changes what is learned.

    `grappe train` has an option for each field, with the docstring under the field as its help.
    """

    evaluate_every: int | None = None
    """Steps between evaluations. Default: each epoch."""
    save_every: int | None = None
    """Steps between checkpoints. Default: each epoch."""
    patience: int | None = None
    """Stop after so many evaluations without a lower loss."""
    steps: int | None = None
    """Stop after so many steps in all."""
    keep: int = 3
    """How many of the newest checkpoints stay, beside the best."""
    time_limit: Duration | None = None
    """Save and stop before so many seconds are over; also 30m, 2h, 02:30:00. Default: Slurm's end time."""
    stall_limit: Duration | None = None
    """Abort when no step, evaluated batch or save ends in so many seconds; also 5m. Default: learned from the steps."""
    stop_on_failed_save: bool = False
    """Abort when a checkpoint cannot be written."""
    log_samples: bool = False
    """Write the sample ids of each step and evaluation into the run's samples folder."""
    log: Names = ()
    """Loggers beside the run's curves: tensorboard, wandb (offline)."""
    profile: Ranks = ()
    """Profile a few steps of the processes with these ranks: 0, or 0,3."""
    profile_steps: int = 5
    """How many steps to profile."""
    bare: bool = False
    """Neither evaluate nor save, and go on beyond the task's epochs: to measure steps."""

    def __post_init__(self) -> None:
        at_least(self, 1, "evaluate_every", "save_every", "patience", "steps", "keep", "profile_steps")
