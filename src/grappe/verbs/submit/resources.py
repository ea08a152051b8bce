"""Works out a job's resources from a submission: its plan, its site and layout, the options of sbatch or salloc."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from grappe import engines, sites
from grappe.errors import PlanError, UsageError
from grappe.fields import seconds
from grappe.plan import Plan
from grappe.sites import sbatch, slurm
from grappe.sites.layout import Layout, ResourceRequest, fit, layout
from grappe.sites.schema import Site
from grappe.sites.script import resource_options, with_mps
from grappe.verbs.submit.submission import AUTO, ON_CPU, SCRIPT, SPREAD, TRAIN, TUNE, JobOptions, Submission

OF_SCRIPTS = ("env", "modules", "with_", "requirements", "wheels", "stage", "chain", "restarts", "doctor")
"""Fields of JobOptions that say what a job's script does."""


def requests(submission: Submission) -> Iterator[ResourceRequest]:
    """Yields the resources of each job: one job for each number of GPUs; with AUTO, without a time limit yet."""
    job = submission.job
    if job.time == AUTO and submission.command != TRAIN:
        raise UsageError(
            f"--time auto is for trainings, whose steps can be foreseen: give this {submission.command} a limit, "
            "as --time 3h"
        )
    limit = seconds(job.time, "--time") if job.time and job.time != AUTO else None
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


def laid_out(submission: Submission, resources: ResourceRequest) -> tuple[Layout, Site, Plan]:
    """Returns the layout of one job, its site, and the plan of its processes; of a search, of one trial.

    Raises:
        GrappeError: the plan does not fit the site, or the site forbids the job.
    """
    site, plan = placed(submission, resources)
    job_layout = layout(
        dataclasses.replace(plan, replicate=plan.replicate * submission.parallel), site, resources
    )
    if submission.command not in SPREAD:
        job_layout = _on_one_node(submission, site, job_layout)
    return job_layout, site, plan


def placed(submission: Submission, resources: ResourceRequest) -> tuple[Site, Plan]:
    """Returns the site of one job, and the plan of its processes.

    Raises:
        GrappeError: the plan or the site is wrong.
    """
    plan = _plan(submission, resources)
    engines.check_name(plan.engine)
    return _site(submission, plan), plan


def allocation(submission: Submission) -> list[str]:
    """Returns the command that allocates the resources of `submission` and opens a shell there.

    Raises:
        GrappeError: the submission is wrong, the site forbids it, or an option has no meaning without a script.
    """
    job, default = submission.job, JobOptions()
    if job.time == AUTO:
        raise UsageError("--interactive opens a shell, whose time is yours: give it, as --time 2h")
    for name in OF_SCRIPTS:
        if getattr(job, name) != getattr(default, name):
            option = name.strip("_").replace("_", "-")
            raise UsageError(
                f"--{option} is for a job's script, and --interactive opens a shell: leave it out, and prepare "
                "the environment in that shell"
            )
    job_requests = list(requests(submission))
    if len(job_requests) > 1:
        raise UsageError("--interactive opens one shell: give one number of --gpus")
    job_layout, site, plan = laid_out(submission, job_requests[0])
    options = with_mps(resource_options(site, job_layout, job.account), site, job_layout, plan)
    return [
        "salloc",
        *sbatch.merged([f"--job-name={job.name or 'interactive'}", *options], sbatch_options(job)),
    ]


def line_in_allocation(submission: Submission) -> list[str]:
    """Returns the line by which `submission`'s command is started in the shell that `allocation` opens."""
    job_layout, _, plan = laid_out(submission, next(requests(submission)))
    words = ["python" if submission.command == SCRIPT else "grappe"]
    words += [] if submission.command == SCRIPT else [submission.command]
    words += submission.arguments
    if submission.command in (TRAIN, "evaluate") and submission.plans == ("",) and str(plan):
        words += ["--plan", str(plan)]  # as --gpus has made it
    if submission.command not in SPREAD:
        return words  # it starts its processes by itself
    bind = ["--gpu-bind=none"] if job_layout.gpus else []
    return ["srun", f"--cpus-per-task={job_layout.cores}", *bind, *words]


def sbatch_options(job: JobOptions) -> tuple[str, ...]:
    """Returns the checked options that the user gives to sbatch."""
    if job.queue and (job.partition or job.qos):
        raise UsageError(
            "--queue is one of the site's queues, --partition and --qos are Slurm's own: give one of them"
        )
    return sbatch.options(
        sbatch.UserOptions(
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
    if submission.command in ON_CPU:
        plans = [Plan(device="cpu")]
    largest = max(plans, key=lambda plan: plan.processes / plan.per_device)
    if submission.command == TUNE and resources.gpus:
        raise PlanError(
            f"--gpus={resources.gpus}: a search takes its plan's GPUs for each of --parallel trials: leave --gpus out"
        )
    if any(plan.device != largest.device for plan in plans):
        raise PlanError("some of these plans want GPUs and some do not: submit them as two jobs")
    fitted = fit(largest, resources)
    if len(plans) > 1 and fitted != largest:
        raise PlanError(f"--gpus={resources.gpus}: say in each --plan how it is spread, and leave --gpus out")
    return fitted


def _plan_of_script(submission: Submission, resources: ResourceRequest) -> Plan:
    gpus, processes = resources.gpus, submission.job.processes
    number = processes or gpus or 1
    if gpus == 0:
        return Plan(replicate=number, device="cpu")
    if number % (gpus or number):
        raise UsageError(f"--processes={number} do not share {gpus} GPUs evenly: use a multiple of {gpus}")
    return Plan(replicate=number, per_device=number // (gpus or number))


def _on_one_node(submission: Submission, site: Site, job_layout: Layout) -> Layout:
    """Returns the layout of a command that starts its processes by itself: one task with all of the cores."""
    if job_layout.nodes > 1:
        raise UsageError(
            f"grappe {submission.command} starts its processes on one node, and this plan takes {job_layout.nodes} of "
            f"{site.name}: use a smaller plan"
        )
    return dataclasses.replace(job_layout, processes=1, cores=job_layout.processes * job_layout.cores)


def _site(submission: Submission, plan: Plan) -> Site:
    site = sites.find(submission.job.site or sites.current())
    if plan.device == "cpu" and site.cpu:
        site = sites.find(site.cpu)
    if not site.probe:
        return site
    partitions = slurm.sinfo(slurm.SINFO_FORMAT)
    partition = submission.job.partition or submission.job.queue
    return slurm.probed(site, partitions, partition, wants_gpus=plan.device != "cpu")
