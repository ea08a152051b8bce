"""Submission: a command and the Slurm job that it becomes, as the user asks for it; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.fields import CountsFromZero, Names, at_least

TRAIN = "train"
SCRIPT = "script"
SPREAD = (TRAIN, "evaluate", SCRIPT)
"""What Slurm starts once for each process. All else starts its processes by itself, on one node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How a command is submitted as a Slurm job.

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
    gpus: CountsFromZero = ()
    """GPUs in all; 1,2,4: a job for each number; 0: CPUs only. Default: as the plan says."""
    processes: int | None = None
    """Of a script of your own. Default: one for each GPU."""
    cores: int | None = None
    """Of each process. Default: its GPU's share; of a process without one, its threads and workers."""
    mem: str | None = None
    """Memory of each node: 32G. Default: in proportion to GPUs or cores."""
    mem_per_cpu: str | None = None
    """Memory of each core: 4G."""
    queue: str | None = None
    """One of the site's queues (see: grappe sites NAME)."""
    partition: str | None = None
    """Slurm's partition, if it is none of the site's queues."""
    qos: str | None = None
    """Slurm's quality of service, likewise."""
    constraint: str | None = None
    """Features that the nodes must have, beside the site's."""
    reservation: str | None = None
    """A reservation of nodes."""
    dependency: str | None = None
    """Jobs to wait for: afterok:12345."""
    mail_user: str | None = None
    """Who gets a mail when the job ends, fails or goes back into the queue."""
    sbatch: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = ()
    """Another option of sbatch, as '--exclude=n1'. Repeatable."""
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
        at_least(self, 1, "processes", "cores")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A command to submit, and how."""

    command: str = TRAIN
    """One of grappe's, or SCRIPT."""
    task: str | None = None
    script: Path | None = None
    """A Python script of the user's own."""
    arguments: tuple[str, ...]
    """What the command is called with: the task first, or the script."""
    plans: tuple[str, ...] = ("",)
    """One, but of a command that runs several, one after the other."""
    fields: tuple[str, ...] = ()
    run: Path | None = None
    """The folder of a training's run, or of the run that the command reads."""
    data: str | None = None
    loggers: tuple[str, ...] = ()
    job: JobOptions = dataclasses.field(default_factory=JobOptions)
