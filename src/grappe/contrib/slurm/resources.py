"""Works out a job's resources from a submission: its plan, its site and layout, the options of sbatch or salloc."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from grappe import engines, sites
from grappe.contrib.slurm import slurm
from grappe.contrib.slurm.array import PLACE, TASK_ID, Array
from grappe.contrib.slurm.script import resource_options, with_mps
from grappe.errors import PlanError, UsageError
from grappe.fields import NumberRange, split
from grappe.plan import Plan
from grappe.sites import sbatch
from grappe.sites.layout import Layout, fit, layout, on_site, sliced
from grappe.sites.sbatch import AUTO, FEWEST, LAUNCH, SCRIPT, TRAIN, TUNE, JobOptions
from grappe.sites.schema import Site
from grappe.training.options import Options
from grappe.training.task_reference import TaskReference

ON_CPU = ("data", "curves", "engines", "export", "predict", "prune", "report", "runs", "tasks")
"""Commands that use no GPU, and take no plan: their jobs have none."""
SPREAD = (TRAIN, "evaluate", SCRIPT)
"""Commands that Slurm starts once for each process; others start their processes by themselves, on one node."""


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
    """Epochs that the training's initial weights have done already: it begins after them."""
    data: str | None = None
    parallel: int = 1
    """Number of a search's trials that are trained at a time, each under the plan."""
    study: Path | None = None
    """A search's folder; None: in the job's."""
    loggers: tuple[str, ...] = ()
    options: Options = dataclasses.field(default_factory=Options)
    """Options of a training."""
    job: JobOptions = dataclasses.field(default_factory=JobOptions)
    array: Array | None = None
    """The tasks of a job array; None: one job."""

    @property
    def file(self) -> Path | None:
        """The user's script that the job, or launch in it, runs; None: a task."""
        return Path(self.arguments[self.arguments.index("--") + 1]) if self.command == LAUNCH else self.script

    @property
    def fields_of_tasks(self) -> list[tuple[str, ...]]:
        """The fields of each task of an array, or of the one job."""
        tasks = self.array or Array(ids=(0,))
        words = {number: tuple(text.replace(PLACE, str(number)) for text in self.fields) for number in tasks.ids}
        return [(*fields, *tasks.words.get(number, ())) for number, fields in words.items()]

    @property
    def reference(self) -> TaskReference:
        """Names the task with its fields, those of an array's first task."""
        assert self.task is not None
        return TaskReference.of(self.task, split(self.fields_of_tasks[0]))


OF_SCRIPTS = (
    "env", "modules", "with_", "requirements", "wheels", "stage", "chain", "restarts", "doctor", "spare", "array",
)  # fmt: skip
"""Fields of JobOptions that say what a job's script does."""


def jobs_of(submission: Submission) -> Iterator[Submission]:
    """Yields the submission of each job, its options checked: one job for each number of GPUs."""
    job = submission.job
    if job.time == AUTO and submission.command != TRAIN:
        raise UsageError(
            f"--time auto is for trainings, whose steps can be foreseen: give this {submission.command} a limit, "
            "as --time 3h"
        )
    if submission.command == TRAIN and submission.run is not None and len(job.gpus) > 1:
        raise UsageError("--run is one run's folder, and several numbers of GPUs are several runs: leave it out")
    for name, value in (("gpus", job.gpus), ("nodes", job.nodes)):
        if isinstance(value, NumberRange) and submission.command != TRAIN:
            raise UsageError(
                f"--{name} {value}: a range is for trainings, whose plan can grow: give a number to "
                f"{submission.command}"
            )
    if job.spare and submission.command not in (TRAIN, LAUNCH):
        raise UsageError(
            f"--spare is for trainings, which go on from a checkpoint: leave it out of {submission.command}"
        )
    sbatch.options(job)
    _check_array(submission)
    if not job.gpus:
        yield submission
    for number in job.gpus:
        yield dataclasses.replace(submission, job=dataclasses.replace(job, gpus=(number,)))


def _check_array(submission: Submission) -> None:
    command, tasks, texts = submission.command, submission.array, (*submission.arguments, submission.data or "")
    if tasks is None:
        if any(PLACE in text for text in texts):
            raise UsageError(f"{PLACE} is the id of a task of an array: give --array 1-20, or leave it out")
        return
    if command not in (TRAIN, LAUNCH, SCRIPT):
        raise UsageError(f"--array is for train, launch and scripts, not for {command}: see grappe tune --jobs array")
    if submission.job.chain:
        raise UsageError("--chain: each task of an array requeues itself: leave it out, or --array")
    alike = not tasks.words and not any(word in text for text in texts for word in (PLACE, TASK_ID))
    if command == TRAIN and len(tasks.ids) > 1 and alike:
        raise UsageError(f"the {len(tasks.ids)} tasks would train the same: write {PLACE}, the id, as in seed={PLACE}")


def laid_out(submission: Submission) -> tuple[Layout, Site, Plan]:
    """Returns the layout of one job, its site, and the plan of its processes; of a search, of one trial.

    Raises:
        GrappeError: the plan does not fit the site, or the site forbids the job.
    """
    site, plan = placed(submission)
    parallel = dataclasses.replace(plan, replicate=plan.replicate * submission.parallel)
    job_layout = layout(parallel, site, submission.job)
    if _is_spread(submission, job_layout):
        return job_layout, site, plan
    # The command starts its processes itself: one task with all of the cores.
    if job_layout.nodes > 1:
        raise UsageError(
            f"grappe {submission.command} starts its processes on one node, and this plan takes {job_layout.nodes} of "
            f"{site.name}: use a smaller plan"
        )
    cores = job_layout.processes * job_layout.cores
    return dataclasses.replace(job_layout, processes=1, cores=cores), site, plan


def _is_spread(submission: Submission, job_layout: Layout) -> bool:
    """Returns whether Slurm starts the command once for each process; launch starts a node's own by itself."""
    return submission.command in SPREAD or (submission.command == LAUNCH and job_layout.nodes > 1)


def placed(submission: Submission) -> tuple[Site, Plan]:
    """Returns the site of one job, and the plan of its processes.

    Raises:
        GrappeError: the plan or the site is wrong.
    """
    job, plan = submission.job, _plan(submission)
    engines.check_name(plan.engine)
    site = sites.find(job.site or sites.current(), retired=False)
    if plan.device == "cpu" and site.cpu:
        site = sites.find(site.cpu)
    if job.gpus and isinstance(part := job.gpus[0], str):
        site = sliced(site, part)
    if not site.probe:
        return site, on_site(plan, site)
    partitions = slurm.sinfo(slurm.SINFO_FORMAT)
    return slurm.probed(site, partitions, job.partition or job.queue, wants_gpus=plan.device != "cpu"), plan


def without_options(arguments: Iterable[str], names: Collection[str]) -> list[str]:
    """Returns a command's arguments without some options and their values."""
    rest: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if name in names:
            if not equals:
                next(remaining, None)
            continue
        rest.append(word)
        if word == "--":
            rest += remaining  # of a script
    return rest


def with_plan(submission: Submission, plan: str, job: JobOptions) -> Submission:
    """Returns the submission with a plan and options that were chosen for it."""
    words = (*without_options(submission.arguments, ("--plan",)), *(("--plan", plan) if plan else ()))
    return dataclasses.replace(submission, arguments=words, plans=(plan,), job=job)


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
    if len(job.gpus) > 1 or isinstance(job.nodes, NumberRange):
        raise UsageError("--interactive opens one shell: give one number of --gpus, of --nodes")
    job_layout, site, plan = laid_out(next(jobs_of(submission)))
    options = with_mps(resource_options(site, job_layout, job.account), site, job_layout, plan)
    return ["salloc", *sbatch.merged([f"--job-name={job.name or 'interactive'}", *options], sbatch.options(job))]


def line_in_allocation(submission: Submission) -> list[str]:
    """Returns the line by which `submission`'s command is started in the shell that `allocation` opens."""
    job_layout, _, plan = laid_out(next(jobs_of(submission)))
    words = ["python" if submission.command == SCRIPT else "grappe"]
    words += [] if submission.command == SCRIPT else [submission.command]
    words += submission.arguments
    if submission.command in (TRAIN, "evaluate") and submission.plans == ("",) and str(plan):
        words += ["--plan", str(plan)]  # as --gpus has made it
    if not _is_spread(submission, job_layout):
        return words  # it starts its processes itself
    bind = ["--gpu-bind=none"] if job_layout.gpus else []
    return ["srun", f"--cpus-per-task={job_layout.cores}", *bind, *words]


def _plan(submission: Submission) -> Plan:
    """Returns the plan that determines the resources: of a script, its processes; of several plans, the largest."""
    job = submission.job
    if job.gpus == FEWEST:
        raise UsageError("--gpus auto is for trainings that grappe submit starts: give a number here, as --gpus 2")
    gpus = next((1 if isinstance(number, str) else number for number in job.gpus), None)
    if submission.command == SCRIPT:
        number = job.processes or gpus or 1
        if gpus == 0:
            return Plan(replicate=number, device="cpu")
        if number % (gpus or number):
            raise UsageError(f"--processes={number} do not share {gpus} GPUs evenly: use a multiple of {gpus}")
        return Plan(replicate=number, per_device=number // (gpus or number))
    if job.processes is not None:
        raise UsageError(
            f"--processes is for a Python file, and {submission.command} takes the number from its plan: --plan "
            f"replicate={job.processes}"
        )
    plans = [Plan.parse(text) for text in submission.plans] or [Plan()]
    if submission.command in ON_CPU:
        plans = [Plan(device="cpu")]
    largest = max(plans, key=lambda plan: plan.processes / plan.per_device)
    if submission.command == TUNE and gpus:
        raise PlanError(
            f"--gpus={gpus}: a search takes its plan's GPUs for each of --parallel trials: leave --gpus out"
        )
    if any(plan.device != largest.device for plan in plans):
        raise PlanError("some of these plans want GPUs and some do not: submit them as two jobs")
    of_slice = any(isinstance(number, str) for number in job.gpus)
    fitted = largest if of_slice else fit(largest, gpus)  # layout says why a slice takes one process
    if len(plans) > 1 and fitted != largest:
        raise PlanError(f"--gpus={gpus}: set the processes in each --plan, and leave --gpus out")
    return fitted
