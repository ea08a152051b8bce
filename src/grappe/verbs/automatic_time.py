"""--time auto: the time limit of a job, from an earlier run or a forecast, with a margin."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.fields import split
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.sites import current
from grappe.sites.environment import MADE_ON_NODES
from grappe.sites.layout import Layout, layout, longest
from grappe.sites.sbatch import AUTO
from grappe.sites.schema import Site
from grappe.verbs.foresee.limited import in_limited_process
from grappe.verbs.foresee.training_time import (
    MARGIN,
    RemainingTraining,
    RunQuery,
    TimeCosts,
    earlier_run,
    steps_done,
    time_limit,
)
from grappe.verbs.submission_memory import budget_for, fake_model_of, not_foreseen, warnings_of
from grappe.verbs.submit.resources import Submission, placed
from grappe.words import format_seconds

if TYPE_CHECKING:
    from grappe.foresight.gpu_time import Fabric, StepTime
    from grappe.task import Task

MADE_SECONDS, HERE_SECONDS = 600.0, 120.0
"""From the job's start to the command's: to make an environment on the nodes and examine them, or to examine them."""
START_SECONDS = 60.0  # of a process that was not measured: imports from a file system of a cluster
OF_A_STEP = 0.5  # of the time that training takes for as many samples: what an evaluation takes at most
WRITTEN = 2e8  # bytes/s of a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutomaticTime:
    """Time limit that was not given."""

    seconds: int
    sentence: str
    """The limit and its source."""
    warnings: tuple[str, ...] | None
    """Warnings about the memory and the GPU's use, from the same trace; None: nothing was traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """A training's job whose time is not known yet."""

    submission: Submission
    task: Task
    site: Site
    plan: Plan
    layout: Layout

    @property
    def here(self) -> bool:
        """Returns whether the job's node is taken for one like this machine: it belongs to this cluster."""
        site, node = self.submission.job.site, self.site.node
        this_cluster = site is None or site == current()
        return this_cluster and self.layout.nodes == 1 and node is not None and node.cores == os.cpu_count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Estimate:
    """Estimated costs of a training."""

    costs: TimeCosts
    steps_per_epoch: int
    origin: str
    """The source, for the user."""
    warnings: tuple[str, ...] | None = None


def with_time(submission: Submission) -> tuple[Submission, AutomaticTime | None]:
    """Adds the time limit for --time auto; a limit that the user set stays.

    Raises:
        UsageError: the training's time is unknown; the message says what to do.
        GrappeError: the submission is wrong, or the site forbids it.
    """
    if submission.job.time != AUTO:
        return submission, None
    job = _job(submission)
    estimate = _estimate(job)
    remaining = RemainingTraining.of(
        submission.options,
        done=steps_done(submission.run) or submission.epochs_done * estimate.steps_per_epoch,
        epochs=job.task.epochs,
        steps_per_epoch=estimate.steps_per_epoch,
    )
    made = (submission.job.env or job.site.job.environment) in MADE_ON_NODES
    needed = estimate.costs.seconds(remaining) + (MADE_SECONDS if made else HERE_SECONDS)
    most = longest(job.layout, job.site, submission.job)
    limit = time_limit(needed, 60 * (job.site.ask.min_minutes or 1), most)
    sentence = _limit_in_words(job, estimate, remaining, needed, limit, capped=limit < needed * (1 + MARGIN))
    timed = dataclasses.replace(submission, job=dataclasses.replace(submission.job, time=str(limit)))
    return timed, AutomaticTime(seconds=limit, sentence=sentence, warnings=estimate.warnings)


def _job(submission: Submission) -> _Job:
    from grappe.training.task_reference import TaskReference

    assert submission.task is not None
    site, plan = placed(submission)
    least = 60 * (site.ask.min_minutes or 1)
    try:
        task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    except (ImportError, TaskError) as error:
        raise UsageError(f"--time auto: the task cannot be loaded here ({error}): {_advice(submission)}") from error
    shortest = dataclasses.replace(submission.job, time=str(least))
    return _Job(submission=submission, task=task, site=site, plan=plan, layout=layout(plan, site, shortest))


def _estimate(job: _Job) -> _Estimate:
    """Takes the costs that an earlier run measured, or else foresees them."""
    submission = job.submission
    query = RunQuery(task=job.task, plan=job.plan, site=job.site, layout=job.layout, here=job.here)
    earlier = earlier_run(query, submission.job.runs, submission.run, submission.options)
    if earlier is not None:
        name = printable(earlier.folder.name, 100)
        return _Estimate(
            costs=earlier.costs, steps_per_epoch=earlier.steps_per_epoch, origin=f"as measured in the run {name}"
        )
    try:
        return _foreseen(job)
    except GrappeError as error:
        raise UsageError(
            f"--time auto: no run in {submission.job.runs} has measured this task with this plan on such a device, and "
            f"its time cannot be foreseen: {error}. {_advice(submission)}"
        ) from None


def _advice(submission: Submission) -> str:
    words = shlex.join((submission.command, *submission.arguments))
    return (
        "Give a limit, as --time 3h; or try some steps first, after which --time auto knows them: "
        f"grappe submit --time 15m … -- {words} --steps 100"
    )


def _foreseen(job: _Job) -> _Estimate:
    """Foresees the training's time: on GPUs from a trace and the data sheet; on cores like these from a few steps here.

    The memory is judged from the same trace.

    Raises:
        GrappeError: it cannot be foreseen.
    """
    fabric = _fabric(job)
    plan = dataclasses.replace(job.plan, threads=job.plan.threads or job.layout.cores)
    progress("tracing the model, to foresee the time and the memory that the plan needs")
    try:
        trace = json.loads(in_limited_process(lambda: _traced(job, plan, fabric)))
        if fabric is None:
            progress("running a few steps, to measure the time that they take")
            step = _measured(job, plan)
            seconds, spread = step.total, step.spread
        else:
            seconds, spread = trace["seconds"], trace["spread"]
    finally:
        progress("")
    if fabric is not None:
        origin = f"from the data sheet of {fabric.device.title}, not measured, at its slow end"
    else:
        origin = "as measured on this machine, at the slow end, if the job's cores are as fast as these"
    return _Estimate(
        costs=TimeCosts(
            step=seconds,
            evaluation=OF_A_STEP * seconds * trace["evaluated"],
            save=trace["saved"] / WRITTEN,
            start=START_SECONDS,
            spread=spread,
        ),
        steps_per_epoch=trace["steps_per_epoch"],
        origin=origin,
        warnings=tuple(trace["warnings"]),
    )


def _fabric(job: _Job) -> Fabric | None:
    """Returns the GPUs of a job; None: its steps can be run on this machine's cores.

    Raises:
        UsageError: neither.
    """
    from grappe.verbs.foresee.foresee import site_fabric

    if job.layout.gpus:
        fabric = site_fabric(job.site)
        if fabric is None:
            gpu = job.site.node.gpu if job.site.node else ""
            raise UsageError(
                f"grappe has no data sheet of {job.site.name}'s GPU ({gpu}): run grappe measure in a job there"
            )
        return fabric
    if not job.here:
        raise UsageError(f"the nodes of {job.site.name} seem to have other CPUs than this machine")
    return None


def _measured(job: _Job, plan: Plan) -> StepTime:
    from grappe.launch.local import start_server
    from grappe.training.request import data_folder
    from grappe.training.task_reference import TaskReference
    from grappe.verbs.foresee.measured_step import measured_step

    submission = job.submission
    assert submission.task is not None
    start_server()
    task = TaskReference.of(submission.task, split(submission.fields))
    return measured_step(task, plan, data_folder(None if submission.data is None else Path(submission.data)))


def _traced(job: _Job, plan: Plan, fabric: Fabric | None) -> str:
    """Traces the model once; returns JSON: a GPU's step, the training's sizes, and the warnings."""
    from grappe.foresight.forecast import memory_forecast
    from grappe.foresight.gpu_time import gpu_time
    from grappe.verbs.foresee.measured_step import check_runs_here

    gpu = fabric is not None
    fake_model = fake_model_of(job.task, job.submission, gpu=gpu, records=gpu)
    seconds = spread = None
    if fabric is not None:
        step = gpu_time(fake_model, job.plan, fabric)
        seconds, spread = step.total, step.spread
    else:
        check_runs_here(plan, memory_forecast(fake_model, plan))
    batch = min(job.task.batch_size, fake_model.samples)
    sizes = [parameter.size + sum((*parameter.states, *parameter.whole_states)) for parameter in fake_model.parameters]
    budget, warnings = budget_for(job.site, job.layout, job.plan), list[str]()
    if budget is not None:
        try:
            warnings = warnings_of(fake_model, job.plan, budget, job.site)
        except GrappeError as error:
            warnings = [not_foreseen(error)]
    return json.dumps(
        {
            "seconds": seconds,
            "spread": spread,
            "saved": sum(sizes),
            "evaluated": fake_model.validation_samples / batch,
            "steps_per_epoch": math.ceil(fake_model.samples / job.task.batch_size),
            "warnings": warnings,
        }
    )


def _limit_in_words(
    job: _Job, estimate: _Estimate, remaining: RemainingTraining, needed: float, limit: int, *, capped: bool
) -> str:
    from grappe.sites.script import clock
    from grappe.training.watchers.expected_end import span

    evaluations = f"{remaining.evaluations:,} evaluation{'' if remaining.evaluations == 1 else 's'}"
    text = (
        f"time limit {clock(limit)}: {remaining.steps:,} steps of {format_seconds(estimate.costs.slow_step)} and "
        f"{evaluations}, {estimate.origin}, with start-up"
    )
    if not capped:
        return f"{text} and a margin"
    text = f"{text}, take {span(needed)}, and {job.site.name} gives at most that limit"
    if job.submission.job.chain or not job.site.job.requeue:
        return f"{text}: its jobs do not go back into the queue, so submit --chain {math.ceil(needed / limit)}"
    return f"{text}: the job saves before its end, goes back into the queue and resumes"
