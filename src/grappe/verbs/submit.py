"""grappe submit: checks a training, renders its Slurm script, submits it, and records the job in the run's folder."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from grappe import engines, sites, tasks
from grappe.errors import GrappeError, RunError, TaskError, UsageError
from grappe.fields import seconds, split
from grappe.launch import files as safe
from grappe.launch.files import IN_PART
from grappe.plan import Plan
from grappe.sites import sinfo, slurm
from grappe.sites.layout import ResourceRequest, fit, layout
from grappe.sites.schema import Site
from grappe.sites.script import Script, cost, render
from grappe.training.run import DESCRIPTION, DONE, new_folder
from grappe.verbs.jobs import record_job
from grappe.verbs.submission import Submission

OWN_OPTIONS = ("--run", "--data", "--plan")  # of train: given anew in the script
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


def submit(submission: Submission, *, show: bool = False) -> Iterator[Submitted]:
    """Submits a job, or one for each number of GPUs; with `show`, only renders the scripts.

    Raises:
        GrappeError: the submission is wrong, or sbatch rejects a job; the queue then has none of these jobs.
    """
    yield from submit_all([submission], show=show)


def submit_all(submissions: Iterable[Submission], *, show: bool = False) -> Iterator[Submitted]:
    """Submits several jobs; all are checked before the first is submitted."""
    scripts = [_script(one, request) for one in submissions for request in _resources(one)]
    texts = [render(one) for one in scripts]
    for number, (script, text) in enumerate(zip(scripts, texts, strict=True)):
        if number and not show:
            time.sleep(BETWEEN_SECONDS)
        job = "" if show else _send(script, text)
        yield Submitted(run=script.run, job=job, text=text, cost=cost(script.layout))


def judged(submission: Submission) -> Iterator[str]:
    """Returns sbatch's estimate for each script (--test-only); nothing is submitted, and no files remain.

    Raises:
        GrappeError: the submission is wrong, or sbatch would reject a job.
    """
    for one in [_script(submission, request) for request in _resources(submission)]:
        with tempfile.TemporaryDirectory(prefix="grappe-submit-") as folder:
            file = Path(folder) / "job.sh"
            file.write_text(render(one))
            yield f"{slurm.submit(file, test_only=True) or 'sbatch would take it'}; {cost(one.layout)}"


def _resources(submission: Submission) -> Iterator[ResourceRequest]:
    job = submission.job
    limit = seconds(job.time, "--time") if job.time else None
    if submission.run is not None and len(job.gpus) > 1:
        raise UsageError(
            "--run is one run's folder, and several numbers of GPUs are several runs: leave it out"
        )
    for gpus in job.gpus or (None,):
        yield ResourceRequest(nodes=job.nodes, gpus=gpus, seconds=limit, queue=job.queue, account=job.account)


def _script(submission: Submission, resources: ResourceRequest) -> Script:
    job = submission.job
    plan = fit(Plan.parse(submission.plan), resources)
    tasks.check_name(submission.task)
    engines.check_name(plan.engine)
    site = _site(submission, plan)
    _check_training(submission, plan, existing=(job.env or site.job.environment) == "here")
    _check_folder(site, Path.cwd())
    found = layout(plan, site, resources)
    run = (submission.run or new_folder(job.base, submission.task)).absolute()
    if (run / DONE).exists():
        raise RunError(f"{run} is finished: nothing to submit. Give another folder with --run")
    if job.stage is not None and not job.stage.is_file():
        raise UsageError(f"--stage={job.stage}: there is no such archive")
    chain = job.chain or (0 if site.job.requeue else 1)  # a chain of one does not requeue
    return Script(
        site=site,
        layout=found,
        plan=plan,
        name=job.name or run.name[:64],
        arguments=_arguments(submission, plan),
        task=(submission.task, *submission.fields),
        run=run,
        folder=Path.cwd(),
        data=submission.data or os.environ.get("GRAPPE_DATA", "data"),
        python=sys.executable,
        account=job.account,
        environment=_environment(job.env),
        wheels=job.wheels and job.wheels.absolute(),
        stage=job.stage and job.stage.absolute(),
        chain=chain,
        restarts=job.restarts,
        doctor=job.doctor,
        command=_command(submission, site),
    )


def _site(submission: Submission, plan: Plan) -> Site:
    site = sites.find(submission.job.site or sites.current())
    if not site.probe:
        return site
    known = slurm.sinfo(sinfo.FORMAT)
    return sinfo.probed(site, known, submission.job.queue, wants_gpus=plan.device != "cpu")


def _check_training(submission: Submission, plan: Plan, *, existing: bool) -> None:
    """Checks the task's fields and the plan now, so that an error does not appear only after hours in a queue.

    Args:
        existing: whether the job has this command's Python; another Python may have other packages.
    """
    texts = split(submission.fields)
    try:
        import torch  # noqa: F401

        task = tasks.find(submission.task)
    except (ImportError, TaskError):
        if existing:
            raise
        return
    tasks.make(task, texts)
    if existing:
        engines.check(plan)


def _check_folder(site: Site, folder: Path) -> None:
    if not site.job.submit_from:
        return
    expected = Path(os.path.expandvars(site.job.submit_from))
    if expected.is_absolute() and not folder.is_relative_to(expected):
        raise UsageError(
            f"{site.name} takes jobs from {site.job.submit_from} only, and lets them write nowhere else: "
            f"cd {expected} first"
        )


def _environment(text: str) -> str:
    """Returns the environment's text with absolute paths."""
    if text in ("", "here", "virtualenv", "module") or text.startswith("conda:"):
        return text
    path = Path(text).absolute()
    image = path.suffix in (".sif", ".simg")
    if not (path.is_file() if image else (path / "bin" / "python").exists()):
        what = "no such image" if image else "no bin/python in it"
        raise UsageError(
            f"--env={text}: {what}. Give here, virtualenv, module, conda:NAME, the folder of a virtual environment, "
            "or a .sif image"
        )
    return str(path)


def _arguments(submission: Submission, plan: Plan) -> tuple[str, ...]:
    rest: list[str] = []
    words = iter(submission.arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in OWN_OPTIONS:
            if not equals:
                next(words, None)
            continue
        rest.append(word)
    return ("train", *rest, *(("--plan", str(plan)) if str(plan) else ()))


def _command(submission: Submission, site: Site) -> str:
    return f"grappe submit --site {site.name} -- train {shlex.join(submission.arguments)}"


def _next(logs: Path) -> Path:
    numbers = [int(found[1]) for name in safe.names(logs) if (found := SCRIPT.fullmatch(name))]
    return logs / f"submit-{max(numbers, default=0) + 1}.sh"


def _send(script: Script, text: str) -> str:
    """Writes the script into the run's folder, submits it, and records the job there."""
    logs = script.run / "logs"
    new = not (script.run / DESCRIPTION).exists()
    strangers = (
        [one.name for one in script.run.iterdir() if one.name != "logs"] if script.run.is_dir() else []
    )
    if new and strangers:
        raise RunError(f"{script.run} holds {strangers[0]} and is no run: give an empty folder, or a new one")
    try:
        script.run.mkdir(parents=True, exist_ok=True)
        safe.make_folder(logs)
        safe.refuse_link(logs / "killed")  # which the script itself writes
        file = _next(logs)
        safe.replace(file, text.encode(), IN_PART)
    except OSError as error:
        raise RunError(
            f"{script.run} cannot be written: {error.strerror}: give another with --run"
        ) from error
    try:
        job = slurm.submit(file)
    except GrappeError:
        # What was refused can be read, and is no submission.
        safe.rename(file, file.with_name(file.name.replace("submit", "refused", 1)), IN_PART)
        raise
    record_job(script.run, job, script.site.name, cost(script.layout))
    return job
