"""Submission: a training and the requested Slurm job; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.fields import Counts, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a training's Slurm job.

    `grappe submit` has an option for each field, with the docstring under the field as its help.
    """

    site: str | None = None
    """Cluster (see: grappe sites). Default: this one."""
    account: str | None = None
    """Account to be billed."""
    time: str | None = None
    """Time limit: 90m, 3h, 1-00:00:00. Default: 1 h."""
    nodes: int | None = None
    """Number of nodes. Default: as few as the plan needs."""
    gpus: Counts = ()
    """Total number of GPUs; 1,2,4: a job for each number. Default: as the plan needs."""
    queue: str | None = None
    """Partition or quality of service."""
    name: str | None = None
    """The job's name. Default: the run's."""
    env: str = ""
    """Environment: here, virtualenv (made on each node), module, conda:NAME, a venv's folder, a .sif image. Default:
    the site's."""
    wheels: Path | None = None
    """Folder of wheels, besides the site's."""
    stage: Path | None = None
    """Tar archive of data, unpacked to local scratch on each node."""
    chain: int = 0
    """Number of jobs in a row, for sites where jobs may not requeue."""
    restarts: int = 50
    """Maximal number of requeues of the job."""
    doctor: bool = True
    """Examine the nodes with grappe doctor first."""
    base: Path = Path("runs")
    """Folder of runs."""

    def __post_init__(self) -> None:
        at_least(self, 0, "chain", "restarts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A training to submit, and its job's options."""

    task: str
    arguments: tuple[str, ...]
    """Arguments of grappe train, the task first."""
    plan: str = ""
    fields: tuple[str, ...] = ()
    run: Path | None = None
    data: str | None = None
    job: JobOptions = dataclasses.field(default_factory=JobOptions)
