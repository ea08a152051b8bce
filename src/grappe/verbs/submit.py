"""grappe submit: submits the scripts of jobs, and records each job in its run's folder."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from grappe.errors import GrappeError, RunError
from grappe.launch import files
from grappe.launch.files import IN_CHECKPOINT, IN_PART
from grappe.sites import slurm
from grappe.sites.script import Script, cost, render
from grappe.training.run import DESCRIPTION
from grappe.verbs.job_resources import requests
from grappe.verbs.job_script import JobScript, job_script
from grappe.verbs.jobs import record_job
from grappe.verbs.submission import Submission

SCRIPT = re.compile(r"(?:submit|refused)-(\d{1,9})\.sh", re.ASCII)
BETWEEN_SECONDS = 1.0  # between submissions, as the Alliance asks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted:
    """A submitted job; or with `show`, one that is only rendered."""

    run: Path
    job: str
    """The job's id; "" if it was only rendered."""
    text: str
    """The script's text."""
    cost: str
    note: str = ""
    """The reason why packages were not checked; "" if they were."""
    warnings: tuple[str, ...] = ()
    """Warnings of what will cost time or files, one line each."""
    time_note: str = ""
    """The source of the time limit, with --time auto."""


Examine = Callable[[Submission, JobScript], None]


def submit(
    submission: Submission, *, show: bool = False, examine: Examine | None = None
) -> Iterator[Submitted]:
    """Submits a job, or one for each number of GPUs; with `show`, only renders the scripts.

    Args:
        examine: called with each job's script when all were checked, before the first is submitted.

    Raises:
        GrappeError: the submission is wrong, or sbatch rejects a job; the queue then has none of these jobs.
    """
    yield from submit_all([submission], show=show, examine=examine)


def submit_all(
    submissions: Iterable[Submission], *, show: bool = False, examine: Examine | None = None
) -> Iterator[Submitted]:
    """Submits several jobs; all are checked before the first is submitted."""
    jobs = [(submission, request) for submission in submissions for request in requests(submission)]
    made = [job_script(submission, request, show=show) for submission, request in jobs]
    texts = [render(job.script) for job in made]
    for (submission, _), made_job in zip(jobs, made, strict=True):
        if examine is not None:
            examine(submission, made_job)
    for number, (made_job, text) in enumerate(zip(made, texts, strict=True)):
        script = made_job.script
        if number and not show:
            time.sleep(BETWEEN_SECONDS)
        job = "" if show else _send(script, text)
        yield Submitted(
            run=script.run,
            job=job,
            text=text,
            cost=cost(script.layout),
            note=made_job.unchecked,
            warnings=made_job.warnings,
            time_note=script.time_note,
        )


def judged(submission: Submission) -> Iterator[str]:
    """Returns sbatch's estimate for each script (--test-only); nothing is submitted, and no files remain.

    Raises:
        GrappeError: the submission is wrong, or sbatch would reject a job.
    """
    for script in [job_script(submission, request).script for request in requests(submission)]:
        with tempfile.TemporaryDirectory(prefix="grappe-submit-") as folder:
            file = Path(folder) / "job.sh"
            file.write_text(render(script))
            yield f"{slurm.submit(file, test_only=True) or 'sbatch would take it'}; {cost(script.layout)}"
            if script.time_note:
                yield script.time_note


def _next(logs: Path) -> Path:
    numbers = [int(match[1]) for name in files.names(logs) if (match := SCRIPT.fullmatch(name))]
    return logs / f"submit-{max(numbers, default=0) + 1}.sh"


def _send(script: Script, text: str) -> str:
    """Writes the script into the run's folder, submits it, and records the job there."""
    logs = script.run / "logs"
    new = not (script.run / DESCRIPTION).exists()
    strangers = (
        [entry.name for entry in script.run.iterdir() if entry.name != "logs"] if script.run.is_dir() else []
    )
    if new and strangers:
        raise RunError(f"{script.run} holds {strangers[0]} and is no run: give an empty folder, or a new one")
    try:
        script.run.mkdir(parents=True, exist_ok=True)
        files.make_folder(logs)
        files.refuse_link(logs / "killed")  # which the script itself writes
        file = _next(logs)
        files.replace(file, text.encode(), IN_PART)
        if script.packages is not None:
            folder = logs / script.packages.folder_name
            files.make_folder(folder, IN_PART)
            for name, content in script.packages.files.items():
                files.replace(folder / name, content, IN_CHECKPOINT)
    except OSError as error:
        raise RunError(
            f"{script.run} cannot be written: {error.strerror}: give another with --run"
        ) from error
    try:
        job = slurm.submit(file)
    except GrappeError:
        # What was refused can be read, and is no submission.
        files.rename(file, file.with_name(file.name.replace("submit", "refused", 1)), IN_PART)
        raise
    record_job(script.run, job, script.site.name, cost(script.layout))
    return job
