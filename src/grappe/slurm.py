"""grappe.slurm: Slurm jobs from a notebook. Submit, sweeps over numbers of GPUs, the queue, logs."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grappe import cli_slurm
from grappe.cli import app
from grappe.sites import slurm
from grappe.sites.slurm import Entry
from grappe.verbs import jobs
from grappe.verbs.logs import files, lines
from grappe.verbs.submit import Submission
from grappe.verbs.submit import submit as submit_verb

BASE = Path("runs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted training."""

    run: Path
    """Its folder: grappe.load(job.run) once it is finished."""
    job: str
    cost: str
    """What it costs at most."""

    def wait(self) -> int:
        """Waits for its end, restarts included; its exit code, 0 when it is finished."""
        return jobs.wait(self.run, self.job)

    def cancel(self) -> None:
        """Cancels it; what was saved stays."""
        slurm.cancel([self.job])

    def log(self, rank: int | None = None) -> str:
        """What it wrote so far, or what its process `rank` wrote."""
        return "".join(lines(self.run, rank))


def submit(
    commands: str | Iterable[str], gpus: int | Iterable[int] | None = None, **options: Any
) -> list[Job]:
    """Submits a job for each command and each number of GPUs.

    Args:
        commands: what follows `grappe train`: "digits lr=0.2 --plan precision=bf16"; or several of them. A task of
            a notebook's cell belongs into a file first: a job starts after the notebook has gone.
        gpus: GPUs in all, or several numbers for a sweep; None: as each plan says.
        options: as of `grappe submit`: site, account, time, nodes, queue, name, environment, wheels, stage, chain,
            restarts, doctor, run, base.

    Raises:
        GrappeError: something is wrong with what was asked, or sbatch refuses.
    """
    several = [commands] if isinstance(commands, str) else list(commands)
    numbers = (gpus,) if isinstance(gpus, int) else tuple(gpus or ())
    asked = [Submission(**_read(one), gpus=numbers, **options) for one in several]
    for one in asked:
        for _ in submit_verb(one, show=True):  # all are checked before the first is submitted
            pass
    made = itertools.chain.from_iterable(submit_verb(one) for one in asked)
    return [Job(run=one.run, job=one.job, cost=one.cost) for one in made]


def _read(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    told = cli_slurm.read_training(app, ("train", *words))
    return {name: value for name, value in told.items() if value is not None}


def queue(
    only: Iterable[Job] | None = None, *, until_empty: bool = False, every: float = jobs.QUERY_SECONDS
) -> list[Entry]:
    """The user's jobs in the queue, or which of `only` are still there.

    Args:
        until_empty: come back only when none is left; asks Slurm every so many seconds, which sites want to be many.
    """
    numbers = None if only is None else [one.job for one in only]
    while True:
        found = slurm.queue(numbers) if numbers != [] else []
        if not until_empty or not found:
            return found
        time.sleep(every)


def logs(contains: Job | str = "", base: Path | str = BASE) -> list[Path]:
    """The log files of a job, or of all runs under `base` whose name or job contains the text; the newest run first."""
    if isinstance(contains, Job):
        return files(contains.run)
    folders = sorted(
        (one for one in Path(base).absolute().glob("*/logs")),
        key=lambda one: one.stat().st_mtime,
        reverse=True,
    )
    return [
        file
        for folder in folders
        for file in sorted([*folder.glob("job-*.out"), *folder.glob("rank-*.log")])
        if contains in folder.parent.name or contains in file.name
    ]
