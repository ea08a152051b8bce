"""Submission: a command and the requested Slurm job; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.fields import CountsFromZero, Names, at_least
from grappe.training.options import Options

TRAIN = "train"
SCRIPT = "script"
TUNE = "tune"
AUTO = "auto"  # the time limit that is foreseen
TPE = "tpe"  # the default sampler of tune, of the extra of that name
ON_CPU = ("data", "curves", "engines", "export", "predict", "prune", "report", "runs", "tasks")
"""Commands that use no GPU, and take no plan: their jobs have none."""
SPREAD = (TRAIN, "evaluate", SCRIPT)
"""Commands that Slurm starts once for each process; other commands start their processes by themselves, on one node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a command's Slurm job.

    `grappe submit` has an option for each field, with the docstring under the field as its help.
    """

    site: str | None = None
    """Cluster (see: grappe sites). Default: this one."""
    account: str | None = None
    """Account to be billed."""
    time: str | None = None
    """Time limit: 90m, 3h, 1-00:00:00; auto: of a training, as measured or foreseen, with a margin. Default: 1 h."""
    nodes: int | None = None
    """Number of nodes. Default: as few as the plan needs."""
    gpus: CountsFromZero = ()
    """Total number of GPUs; 1,2,4: a job for each number; 0: CPUs only. Default: as the plan needs."""
    processes: int | None = None
    """Number of processes of a script of your own. Default: one for each GPU."""
    cores: int | None = None
    """Cores of each process. Default: its GPU's share; without GPUs, its threads and workers."""
    mem: str | None = None
    """Memory of each node: 32G. Default: in proportion to GPUs or cores."""
    mem_per_cpu: str | None = None
    """Memory of each core: 4G."""
    queue: str | None = None
    """Queue of the site: a partition or quality of service (see: grappe sites NAME)."""
    partition: str | None = None
    """Partition of Slurm that is no queue of the site."""
    qos: str | None = None
    """Quality of service of Slurm that is no queue of the site."""
    constraint: str | None = None
    """Features of the nodes, besides the site's."""
    reservation: str | None = None
    """Reservation of nodes."""
    dependency: str | None = None
    """Jobs to wait for: afterok:12345."""
    mail_user: str | None = None
    """Address for a mail when the job ends, fails or is requeued."""
    sbatch: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = ()
    """Any other option of sbatch: '--exclude=n1'. Repeatable."""
    name: str | None = None
    """The job's name. Default: the run's."""
    env: str = ""
    """Environment: here, virtualenv (made on each node), module, conda:NAME, a venv's folder, a .sif image. Default:
    the site's."""
    modules: Names = ()
    """Modules to load instead of the site's: python/3.12,gcc,cuda/12.6."""
    with_: tuple[str, ...] = ()
    """Package to install, NAME or NAME==VERSION, besides those of the imports and the engine. Repeatable."""
    requirements: Path | None = None
    """File of packages to install, in pip's form."""
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
        at_least(self, 1, "processes", "cores")


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
    """Epochs that the training's initial weights have done already: it begins behind them."""
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
