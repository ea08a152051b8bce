"""Submission: a command and the requested Slurm job; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.sites.sbatch import SCRIPT, TRAIN, JobOptions
from grappe.training.options import Options

TPE = "tpe"  # the default sampler of tune, of the extra of that name
ON_CPU = ("data", "curves", "engines", "export", "predict", "prune", "report", "runs", "tasks")
"""Commands that use no GPU, and take no plan: their jobs have none."""
SPREAD = (TRAIN, "evaluate", SCRIPT)
"""Commands that Slurm starts once for each process; other commands start their processes by themselves, on one node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A command to submit, and its job's options."""

    command: str = TRAIN
    """Name of a command of grappe, or SCRIPT."""
    task: str | None = None
    script: Path | None = None
    """A Python script of the user's own."""
    arguments: tuple[str, ...]
    """Arguments of the command, the task or the script first."""
    plans: tuple[str, ...] = ("",)
    """Texts of the plans; several for a command like measure."""
    fields: tuple[str, ...] = ()
    run: Path | None = None
    """Folder of a training's run, or of the run that the command reads."""
    epochs_done: int = 0
    """Epochs that the training's initial weights have done already: it begins after them."""
    data: str | None = None
    parallel: int = 1
    """Number of a search's trials that are trained at a time, each under the plan."""
    sampler: str = ""
    """A search's sampler."""
    study: Path | None = None
    """A search's folder; None: in the job's."""
    loggers: tuple[str, ...] = ()
    options: Options = dataclasses.field(default_factory=Options)
    """Options of a training."""
    job: JobOptions = dataclasses.field(default_factory=JobOptions)
