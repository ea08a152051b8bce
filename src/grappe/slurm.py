"""Submits Slurm jobs from a notebook, also one for each number of GPUs; lists the queue and the logs."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grappe.cli.commands import app
from grappe.cli.submission import read_submission
from grappe.sites import slurm
from grappe.sites.slurm import Entry
from grappe.verbs import jobs
from grappe.verbs.logs import files, lines
from grappe.verbs.submission import JobOptions
from grappe.verbs.submit import submit_all

__all__ = ["Job", "JobOptions", "logs", "queue", "submit"]

BASE = Path("runs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted training."""

    run: Path
    """The run's folder: grappe.load(job.run) once the job is finished."""
    job: str
    cost: str
    """The job's maximal cost."""

    def wait(self) -> int:
        """Waits for the job's end, restarts included; returns the exit code, 0 if the training is finished."""
        return jobs.wait(self.run, self.job)

    def cancel(self) -> None:
        """Cancels the job; checkpoints are kept."""
        slurm.cancel([self.job])

    def log(self, rank: int | None = None) -> str:
        """Returns the job's output so far, or that of its process `rank`."""
        return "".join(lines(self.run, rank))


def submit(
    commands: str | Iterable[str],
    gpus: int | Iterable[int] | None = None,
    *,
    run: Path | str | None = None,
    **options: Any,
) -> list[Job]:
    """Submits a job for each command and each number of GPUs; all are checked before the first is submitted.

    Args:
        commands: one or more texts of arguments after `grappe train`: "digits lr=0.2 --plan precision=bf16". A task of
            a notebook's cell must be in a file: a job may start after the notebook has ended.
        gpus: the total number of GPUs, or several numbers for a sweep; None: as each plan says.
        run: the run's folder; None makes a new one, as `--run` among the commands' words does.
        options: the other fields of JobOptions, as `grappe submit` has them: site, account, time, ...

    Raises:
        GrappeError: a command or an option is wrong, or sbatch rejects a job.
    """
    several = [commands] if isinstance(commands, str) else list(commands)
    numbers = (gpus,) if isinstance(gpus, int) else tuple(gpus or ())
    job = JobOptions(gpus=numbers, **options)
    submissions = [read_submission(("train", *shlex.split(command)), job, app) for command in several]
    if run is not None:
        submissions = [dataclasses.replace(one, run=Path(run)) for one in submissions]
    made = submit_all(submissions)
    return [Job(run=one.run, job=one.job, cost=one.cost) for one in made]


def queue(
    only: Iterable[Job] | None = None, *, until_empty: bool = False, every: float = jobs.QUERY_SECONDS
) -> list[Entry]:
    """Lists the user's jobs in the queue, or those of `only` still in it.

    Args:
        until_empty: return only when no job is left.
            every: seconds between queries of Slurm; sites ask for few queries.
    """
    numbers = None if only is None else [one.job for one in only]
    while True:
        found = slurm.queue(numbers) if numbers != [] else []
        if not until_empty or not found:
            return found
        time.sleep(every)


def logs(contains: Job | str = "", base: Path | str = BASE) -> list[Path]:
    """Lists a job's log files, or those of all runs under `base` whose name or job contains a text; newest first."""
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
