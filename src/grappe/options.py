"""Options: how a training is watched and when it stops; the command line has them without loading torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a training is watched; none of it changes what is learned."""

    evaluate_every: int | None = None
    """Steps between evaluations; None: at the end of each epoch."""
    save_every: int | None = None
    """Steps between checkpoints; None: at the end of each epoch."""
    patience: int | None = None
    """Stop after so many evaluations without a lower loss."""
    steps: int | None = None
    """Stop after so many steps in all."""
    keep: int = 3
    """How many of the newest checkpoints stay, beside the best."""
    time_limit: float | None = None
    """Seconds after which to save and stop; None: Slurm's end time, where there is one."""
    stall_limit: float | None = None
    """Seconds without a step, an evaluated batch or a save that count as a standstill; None: learned (Watchdog)."""
    stop_on_failed_save: bool = False
    """Whether a checkpoint that cannot be written ends the training."""
    ledger: bool = False
    """Write down the samples of each step."""
    log: tuple[str, ...] = ()
    """Loggers beside the run's own curves: "tensorboard", "wandb"."""
    profile: tuple[int, ...] = ()
    """The processes to profile a few steps of, by rank."""
    profile_steps: int = 5
    bare: bool = False
    """Neither evaluate nor save, and go on beyond the task's epochs: to measure steps."""
