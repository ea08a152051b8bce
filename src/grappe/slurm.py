"""Submits Slurm jobs from a notebook, also one for each number of GPUs; lists the queue and the logs."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    commands: str | Iterable[str],
    gpus: int | Iterable[int] | None = None,
    *,
    run: Path | str | None = None,
    **options: Any,
) -> list[Job]:
    """Submits a job for each command and each number of GPUs; all are checked before the first is submitted.

    Args:
        commands: what follows `grappe train`: "digits lr=0.2 --plan precision=bf16"; or several of them. A task of
            a notebook's cell belongs into a file first: a job starts after the notebook has gone.
        gpus: GPUs in all, or several numbers for a sweep; None: as each plan says.
        run: the run's folder; None makes a new one, as `--run` among the commands' words does.
        options: the other fields of JobOptions, as `grappe submit` has them: site, account, time, ...

    Raises:
        GrappeError: a command or an option is wrong, or sbatch refuses.
    """
    several = [commands] if isinstance(commands, str) else list(commands)
    numbers = (gpus,) if isinstance(gpus, int) else tuple(gpus or ())
    job = JobOptions(gpus=numbers, **options)
    submissions = [read_submission(("train", *shlex.split(command)), job) for command in several]
    if run is not None:
        submissions = [dataclasses.replace(one, run=Path(run)) for one in submissions]
    made = submit_all(submissions)
    return [Job(run=one.run, job=one.job, cost=one.cost) for one in made]


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
