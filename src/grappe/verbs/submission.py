"""Submission: a training and the Slurm job that it becomes, as the user asks for it; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.fields import Counts, Names, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How a training is submitted as a Slurm job.

    `grappe submit` has an option for each field, with the docstring under the field as its help.
    """

    site: str | None = None
    """A cluster (see: grappe sites). Default: this one."""
    account: str | None = None
    """What is billed."""
    time: str | None = None
    """Time limit: 90m, 3h, 1-00:00:00. Default: 1 h."""
    nodes: int | None = None
    """Default: as few as hold the plan."""
    gpus: Counts = ()
    """GPUs in all; 1,2,4: a job for each number. Default: as the plan says."""
    queue: str | None = None
    """A partition or quality of service."""
    name: str | None = None
    """The job's name. Default: the run's."""
    env: str = ""
    """here, virtualenv (made on each node), module, conda:NAME, a venv's folder, a .sif image. Default: the site's."""
    modules: Names = ()
    """Modules to load, in place of the site's: python/3.12,gcc,cuda/12.6."""
    with_: tuple[str, ...] = ()
    """A package to install, NAME or NAME==VERSION, beside what the imports and the engine need. Repeatable."""
    requirements: Path | None = None
    """A file of packages to install, as pip reads it."""
    wheels: Path | None = None
    """A folder of wheels, beside the site's."""
    stage: Path | None = None
    """A tar archive of data, unpacked to local scratch on each node."""
    chain: int = 0
    """So many jobs in a row, where jobs may not requeue."""
    restarts: int = 50
    """How often the job may go back into the queue."""
    doctor: bool = True
    """Examine the nodes first."""
    base: Path = Path("runs")
    """The folder of runs."""

    def __post_init__(self) -> None:
        at_least(self, 0, "chain", "restarts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A training to submit, and how."""

    task: str
    arguments: tuple[str, ...]
    """What train is called with, the task first."""
    plan: str = ""
    fields: tuple[str, ...] = ()
    run: Path | None = None
    data: str | None = None
    loggers: tuple[str, ...] = ()
    job: JobOptions = dataclasses.field(default_factory=JobOptions)
