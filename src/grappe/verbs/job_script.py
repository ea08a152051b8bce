"""Makes a job's script from a submission: checks the request, lays it out on the site, resolves the packages."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from grappe import engines, sites, tasks
from grappe.errors import PlanError, RunError, TaskError, UsageError
from grappe.fields import seconds, split
from grappe.plan import Plan
from grappe.sites import sbatch, sinfo, slurm
from grappe.sites.environment import MADE_ON_NODES, Packages
from grappe.sites.layout import Layout, ResourceRequest, fit, layout
from grappe.sites.schema import Site
from grappe.sites.script import Script
from grappe.training.run import DONE, Run, new_folder
from grappe.verbs.packages.imports import imported
from grappe.verbs.packages.needed import Needs, prepare
from grappe.verbs.packages.resolve import Wheelhouse
from grappe.verbs.submission import SCRIPT, SPREAD, TRAIN, JobOptions, Submission

OWN_OPTIONS = ("--run", "--data", "--plan")  # of train: given anew in the script
SAVE_ON_SIGNALS = ("grappe", "signal")  # what a script imports that saves when it is told to


def requests(submission: Submission) -> Iterator[ResourceRequest]:
    """Yields the resources of each job: one job for each number of GPUs."""
    job = submission.job
    limit = seconds(job.time, "--time") if job.time else None
    if submission.command == TRAIN and submission.run is not None and len(job.gpus) > 1:
        raise UsageError(
            "--run is one run's folder, and several numbers of GPUs are several runs: leave it out"
        )
    for gpus in job.gpus or (None,):
        yield ResourceRequest(
            nodes=job.nodes,
            gpus=gpus,
            seconds=limit,
            cores=job.cores,
            queue=job.queue,
            own_queue=bool(job.partition or job.qos),
            account=job.account,
        )


def job_script(
    submission: Submission, resources: ResourceRequest, *, show: bool = False
) -> tuple[Script, str]:
    """Returns the script of one job, and the reason why packages were not checked.

    Raises:
        GrappeError: the submission is wrong, the site forbids it, or packages are missing.
    """
    job = submission.job
    plan = _plan(submission, resources)
    engines.check_name(plan.engine)
    site = _site(submission, plan)
    _check_task(submission, plan, existing=(job.env or site.job.environment) == "here")
    _check_folder(site, Path.cwd())
    found = layout(plan, site, resources)
    if submission.command not in SPREAD:
        found = _on_one_node(submission, site, found)
    run = _folder(submission)
    if job.stage is not None and not job.stage.is_file():
        raise UsageError(f"--stage={job.stage}: there is no such archive")
    content, note = _packages(submission, site, plan, show=show)
    is_script = submission.command == SCRIPT
    script = Script(
        site=site,
        layout=found,
        plan=plan,
        name=job.name or run.name[:64],
        arguments=_arguments(submission, plan),
        task=(submission.task, *submission.fields) if submission.task else (),
        run=run,
        folder=Path.cwd(),
        data=submission.data
        or ("" if submission.command != TRAIN else os.environ.get("GRAPPE_DATA", "data")),
        python=sys.executable,
        training=submission.command == TRAIN,
        own_script=is_script,
        torchrun=is_script and (job.processes is not None or plan.processes > 1),
        saves=_saves(submission),
        account=job.account,
        sbatch=_sbatch(job),
        environment=_environment(job.env),
        packages=content,
        modules=job.modules,
        wheels=job.wheels and job.wheels.absolute(),
        stage=job.stage and job.stage.absolute(),
        chain=job.chain or (0 if site.job.requeue else 1),  # a chain of one does not requeue
        restarts=job.restarts,
        doctor=job.doctor,
        command=f"grappe submit --site {site.name} -- {_typed(submission)}",
    )
    return script, note


def _sbatch(job: JobOptions) -> tuple[str, ...]:
    if job.queue and (job.partition or job.qos):
        raise UsageError(
            "--queue is one of the site's queues, --partition and --qos are Slurm's own: give one of them"
        )
    return sbatch.options(
        sbatch.Given(
            mem=job.mem,
            mem_per_cpu=job.mem_per_cpu,
            constraint=job.constraint,
            qos=job.qos,
            partition=job.partition,
            reservation=job.reservation,
            dependency=job.dependency,
            mail_user=job.mail_user,
            others=job.sbatch,
        )
    )


def _plan(submission: Submission, resources: ResourceRequest) -> Plan:
    """Returns the plan that determines the resources: of a script, its processes; of several plans, the largest."""
    job = submission.job
    if submission.command == SCRIPT:
        return _plan_of_script(submission, resources)
    if job.processes is not None:
        raise UsageError("--processes is for a script of your own; of this command the plan says how many")
    plans = [Plan.parse(text) for text in submission.plans] or [Plan()]
    largest = max(plans, key=lambda plan: plan.processes / plan.per_device)
    if any(plan.device != largest.device for plan in plans):
        raise PlanError("some of these plans want GPUs and some do not: submit them as two jobs")
    found = fit(largest, resources)
    if len(plans) > 1 and found != largest:
        raise PlanError(f"--gpus={resources.gpus}: say in each --plan how it is spread, and leave --gpus out")
    return found


def _plan_of_script(submission: Submission, resources: ResourceRequest) -> Plan:
    gpus, processes = resources.gpus, submission.job.processes
    number = processes or gpus or 1
    if gpus == 0:
        return Plan(replicate=number, device="cpu")
    if number % (gpus or number):
        raise UsageError(f"--processes={number} do not share {gpus} GPUs evenly: use a multiple of {gpus}")
    return Plan(replicate=number, per_device=number // (gpus or number))


def _on_one_node(submission: Submission, site: Site, found: Layout) -> Layout:
    """Returns the layout of a command that starts its processes by itself: one task with all of the cores."""
    if found.nodes > 1:
        raise UsageError(
            f"grappe {submission.command} starts its processes on one node, and this plan takes {found.nodes} of "
            f"{site.name}: use a smaller plan"
        )
    return dataclasses.replace(found, processes=1, cores=found.processes * found.cores)


def _folder(submission: Submission) -> Path:
    """Returns the run's folder, or the folder of another command's job.

    Raises:
        RunError: the run is finished, or the run that the command reads is none.
    """
    base, run = submission.job.base, submission.run
    if submission.command == TRAIN:
        assert submission.task is not None
        found = (run or new_folder(base, submission.task)).absolute()
        if (found / DONE).exists():
            raise RunError(f"{found} is finished: nothing to submit. Give another folder with --run")
        return found
    if run is not None:
        Run(run)
    name = submission.script.name if submission.script else submission.command
    return new_folder(base, name).absolute()


def _saves(submission: Submission) -> bool:
    """Returns whether the processes save when they get USR2; other processes would only end sooner."""
    if submission.script is None:
        return submission.command == TRAIN
    return any(name.partition(".")[0] in SAVE_ON_SIGNALS for name in imported(submission.script))


def _packages(submission: Submission, site: Site, plan: Plan, *, show: bool) -> tuple[Packages | None, str]:
    """Returns the packages of an environment that is made on the nodes, and the reason why they were not checked."""
    job, kind = submission.job, submission.job.env or site.job.environment
    if kind not in MADE_ON_NODES:
        for name, value in (("with", job.with_), ("requirements", job.requirements)):
            if value:
                raise UsageError(
                    f"--{name} is for an environment that is made on the nodes: add --env virtualenv (or module). "
                    f"This job's is '{kind}': install it there"
                )
        return None, ""
    if job.wheels is not None and not show and not job.wheels.is_dir():
        raise UsageError(f"--wheels={job.wheels}: there is no such folder")
    house = Wheelhouse(
        modules=job.modules or site.job.modules,
        wheels=job.wheels and job.wheels.absolute(),
        on_modules=kind == "module",
        site=site.name,
    )
    needs = Needs(
        task=submission.task or _task_of_run(submission.run),
        script=submission.script,
        features=(plan.engine, *submission.loggers),
        requested=job.with_,
        file=job.requirements,
    )
    return prepare(needs, house, ask_pip=not show)


def _task_of_run(run: Path | None) -> str | None:
    """Returns the name of the task that a run was trained on, unless it was made in a notebook."""
    name = Run(run).read_description().get("task") if run is not None else None
    return str(name) if name is not None and not str(name).startswith("__main__") else None


def _site(submission: Submission, plan: Plan) -> Site:
    site = sites.find(submission.job.site or sites.current())
    if plan.device == "cpu" and site.cpu:
        site = sites.find(site.cpu)
    if not site.probe:
        return site
    known = slurm.sinfo(sinfo.FORMAT)
    partition = submission.job.partition or submission.job.queue
    return sinfo.probed(site, known, partition, wants_gpus=plan.device != "cpu")


def _check_task(submission: Submission, plan: Plan, *, existing: bool) -> None:
    """Checks the task's fields and the plan now, so that an error does not appear only after hours in a queue.

    Args:
        existing: whether the job has this command's Python; another Python may have other packages.
    """
    if submission.task is None:
        return
    tasks.check_name(submission.task)
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
        # Variables of the node's are expanded there.
        engines.check(dataclasses.replace(plan, offload="cpu") if "$" in plan.offload else plan)


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
    """Returns the command's words, without the options that the script gives anew."""
    if submission.command == SCRIPT:
        return submission.arguments
    if submission.command == TRAIN:
        anew = OWN_OPTIONS
    elif len(submission.plans) == 1 and plan != Plan.parse(submission.plans[0]):
        anew = ("--plan",)  # --gpus has changed it
    else:
        return (submission.command, *submission.arguments)
    rest: list[str] = []
    words = iter(submission.arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in anew:
            if not equals:
                next(words, None)
            continue
        rest.append(word)
    return (submission.command, *rest, *(("--plan", str(plan)) if str(plan) else ()))


def _typed(submission: Submission) -> str:
    words = submission.arguments
    return shlex.join(words if submission.command == SCRIPT else (submission.command, *words))
