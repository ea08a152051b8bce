"""Submits Slurm jobs from a notebook, also one for each number of GPUs; lists the queue and the logs."""

from __future__ import annotations

import dataclasses
import re
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grappe import finder
from grappe.cli.commands import app
from grappe.contrib.slurm import jobs, slurm
from grappe.contrib.slurm.commands import read_submission
from grappe.contrib.slurm.jobs import lines, log_files
from grappe.contrib.slurm.slurm import Entry
from grappe.contrib.slurm.submit import submit_all
from grappe.errors import UsageError
from grappe.launch.terminal import say, write
from grappe.sites.sbatch import JobOptions

__all__ = [
    "Job", "JobOptions", "display_slurm_queue", "gpu_jobs_submitter", "logs", "queue", "search_log", "submit",
]  # fmt: skip

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
        """Returns the job's output so far, or its process `rank`'s."""
        return "".join(lines(self.run, rank))


def submit(
    commands: str | Iterable[str],
    gpus: int | str | Iterable[int] | None = None,
    *,
    run: Path | str | None = None,
    **options: Any,
) -> list[Job]:
    """Submits a job for each command and each number of GPUs; all are checked before the first is submitted.

    Args:
        commands: one or more texts of arguments after `grappe train`: "digits lr=0.2 --plan precision=bf16". A task of
            a notebook's cell must be in a file: a job may start after the notebook has ended.
        gpus: the total number of GPUs, several numbers for a sweep, or a slice's name; None: as each plan says.
        run: the run's folder; None makes a new one, as `--run` among the commands' words does.
        options: the other fields of JobOptions, as `grappe submit` has them: site, account, time, ...

    Raises:
        GrappeError: a command or an option is wrong, or sbatch rejects a job.
    """
    several = [commands] if isinstance(commands, str) else list(commands)
    numbers = (gpus,) if isinstance(gpus, int | str) else tuple(gpus or ())
    job = JobOptions(gpus=numbers, **options)
    submissions = [read_submission(("train", *shlex.split(command)), job, app) for command in several]
    if run is not None:
        submissions = [dataclasses.replace(submission, run=Path(run)) for submission in submissions]
    made = submit_all(submissions)
    return [Job(run=submitted.run, job=submitted.job, cost=submitted.cost) for submitted in made]


def queue(
    only: Iterable[Job] | None = None, *, until_empty: bool = False, every: float = jobs.QUERY_SECONDS
) -> list[Entry]:
    """Lists the user's jobs in the queue, or the ones of `only` that are still in it.

    Args:
        until_empty: return only when no job is left.
        every: seconds between queries of Slurm; sites ask for few queries.
    """
    numbers = None if only is None else [job.job for job in only]
    while True:
        ask = slurm.queue_now if until_empty else slurm.queue
        entries = ask(numbers) if numbers != [] else []
        if entries is not None and (not until_empty or not entries):
            return entries
        time.sleep(every)


def logs(contains: Job | str = "", base: Path | str = BASE) -> list[Path]:
    """Lists the log files of a job, or of all runs under `base` whose name or job contains a text; newest first."""
    if isinstance(contains, Job):
        return log_files(contains.run)
    folders = sorted(Path(base).absolute().glob("*/logs"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    return [
        file
        for folder in folders
        for file in sorted([*folder.glob("job-*.out"), *folder.glob("rank-*.log")])
        if contains in folder.parent.name or contains in file.name
    ]


def gpu_jobs_submitter(
    srun_commands: str | Iterable[str],
    n_gpu: int | Iterable[int] = 1,
    module: str | None = None,
    singularity: str | None = None,
    name: str | None = None,
    n_gpu_per_task: int = 1,
    time_max: str = "02:00:00",
    qos: str | None = None,
    partition: str | None = None,
    constraint: str | None = None,
    cpus_per_task: int | None = None,
    exclusive: bool = False,
    account: str | None = None,
    verbose: int = 0,
    email: str | None = None,
    slurm_addon: str | None = None,
    script_addon: str | None = None,
    site: str | None = None,
) -> list[str]:
    """Submits a job for each command and each number of GPUs, as idr_pytools of IDRIS's course does; returns their ids.

    Args:
        srun_commands: scripts with their arguments, "dlojz.py -b 128"; or tasks, "digits lr=0.2", or other commands of
            grappe, "evaluate runs/digits-1".
        module: modules to load, with spaces or commas between.
        singularity: an image.
        verbose: above 0, each script is printed.
        slurm_addon: further options of sbatch: "--exclude=n1".
        site: as in `submit`; the others are as there, by the names of idr_pytools.

    Raises:
        GrappeError: an argument is wrong, has no meaning here, or sbatch rejects a job.
    """
    if n_gpu_per_task != 1:
        raise UsageError(
            f"n_gpu_per_task={n_gpu_per_task}: a process has one GPU here; several processes share a model by the "
            "plan: shard=2, tensor=2, pipeline=2"
        )
    if script_addon:
        raise UsageError(
            "script_addon is a piece of shell, and nothing that is typed becomes one here: load modules with "
            "module=…, export variables before submitting, and do the rest in your script"
        )
    several = [srun_commands] if isinstance(srun_commands, str) else list(srun_commands)
    options = JobOptions(
        gpus=(n_gpu,) if isinstance(n_gpu, int) else tuple(n_gpu),
        site=site,
        account=account,
        time=time_max,
        name=name,
        qos=qos,
        partition=partition,
        constraint=constraint,
        cores=cpus_per_task,
        mail_user=email,
        modules=tuple(re.split(r"[\s,]+", module.strip())) if module else (),
        env=singularity or "",
        sbatch=(*(("--exclusive",) if exclusive else ()), *shlex.split(slurm_addon or "")),
    )
    submissions = [read_submission(_command(command), options, app) for command in several]
    jobs = []
    for submitted in submit_all(submissions):
        if verbose:
            write(submitted.text, end="")
        say(f"job {submitted.job}: {submitted.cost}; run {submitted.run}")
        jobs.append(submitted.job)
    return jobs


def _command(text: str) -> list[str]:
    words = shlex.split(text)
    return ["train", *words] if words and finder.shipped(words[0]) is not None else words


def display_slurm_queue(name: str | None = None, timestep: float = jobs.QUERY_SECONDS) -> None:
    """Shows the queue until no job is left in it; of IDRIS's course.

    Args:
        name: the jobs' name, as given to `gpu_jobs_submitter`; None: all of the user's.
        timestep: seconds between queries of Slurm; sites ask for few queries.
    """
    shown: list[str] | None = None
    while True:
        if (entries := slurm.queue_now()) is not None:
            lines = [
                f"{entry.job}  {entry.name}  {entry.state}  {entry.reason}  {entry.left}"
                for entry in entries
                if name in (None, entry.name)
            ]
            if lines != shown:
                say("\n".join(lines) or "no job is left in the queue")
            if not lines:
                return
            shown = lines
        time.sleep(timestep)


def search_log(
    name: str = "*", contains: str | Iterable[str] = "", with_err: bool = False, base: Path | str = BASE
) -> list[str]:
    """Lists the log files of jobs, sorted; of IDRIS's course.

    Args:
        name: the beginning of the run's folder, or of the job's name; "*": any.
        contains: a part of the file's name: the job's id; or several, as `gpu_jobs_submitter` returns them.
        with_err: the same list: a job here writes both outputs into one file.
    """
    parts = (contains,) if isinstance(contains, str) else tuple(contains)
    return sorted(
        str(file)
        for file in Path(base).absolute().glob("*/logs/job-*.out")
        if (name == "*" or file.parents[1].name.startswith(name)) and any(part in file.name for part in parts)
    )
