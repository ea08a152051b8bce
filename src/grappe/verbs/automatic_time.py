"""Foresees a job before its queue: the time limit of --time auto, and warnings of too little memory or idle GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import GrappeError, PlanError, TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.fields import NumberRange, split
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.sites import current, slurm
from grappe.sites.environment import MADE_ON_NODES
from grappe.sites.layout import Layout, layout, longest, sizes, stretched
from grappe.sites.sbatch import AUTO, FEWEST, TRAIN, JobOptions
from grappe.sites.schema import Site
from grappe.sites.script import Script, clock
from grappe.training.task_reference import TaskReference
from grappe.verbs.foresee.run_forecast import in_limited_process
from grappe.verbs.foresee.training_time import (
    MARGIN,
    RemainingTraining,
    RunQuery,
    TimeCosts,
    earlier_run,
    steps_done,
    time_limit,
)
from grappe.verbs.submit.resources import Submission, placed, with_plan
from grappe.words import and_more, count_of, format_bytes, format_seconds, plan_name

if TYPE_CHECKING:
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.gpu_time import Fabric, StepTime
    from grappe.foresight.search import MemoryBudget
    from grappe.task import Task


def foreseen_warnings(submission: Submission, script: Script) -> list[str]:
    """Returns warnings if a training's job is foreseen to need more memory than its GPUs have, or to leave them idle.

    The model is traced in a process of its own, on tensors without memory. Where that is not possible, the warning
    says why. None are returned of a job without GPUs, or of GPUs whose memory is unknown.
    """
    budget = budget_for(script.site, script.layout, script.plan)
    if submission.command != TRAIN or submission.task is None or budget is None:
        return []
    try:
        task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    except (ImportError, TaskError):
        return []  # the job has packages that are not here

    def traced() -> list[str]:
        fake_model = fake_model_of(task, submission, gpu=True, records=True)
        return warnings_of(fake_model, script.plan, budget, script.site)

    try:
        return _shown("tracing the model, to foresee the memory that the plan needs", traced)
    except GrappeError as error:
        return [not_foreseen(error)]


def _shown(text: str, work: Callable[[], Any]) -> Any:
    """Calls `work` in a process under limits, and returns its result, of JSON's types; meanwhile shows the text."""
    progress(text)
    try:
        return json.loads(in_limited_process(lambda: json.dumps(work())))
    finally:
        progress("")


def with_gpus(submission: Submission) -> tuple[Submission, str]:
    """Finds the number of GPUs and the plan for --gpus auto; returns a sentence, too.

    The number is the smallest of one node whose memory is enough, with as little recomputation as possible.

    Raises:
        GrappeError: none is enough, the memory is unknown or cannot be foreseen, or the plan has several processes.
    """
    from grappe.verbs.foresee.foresee import budget_in, site_fabric

    job = submission.job
    if job.gpus != FEWEST or submission.command != TRAIN or submission.task is None:
        return submission, ""
    site, plan = placed(dataclasses.replace(submission, job=dataclasses.replace(job, gpus=())))
    budget = budget_in(site)
    if plan.processes > 1 or plan.recompute or plan.memory != "none" or plan.device == "cpu":
        raise UsageError(f"--gpus auto chooses processes and recomputation: leave them out of --plan {plan}")
    if budget is None or site.node is None:
        raise UsageError(f"--gpus auto: the memory of {site.name}'s GPUs is unknown: give a number, as --gpus 2")
    task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    most, fabric = site.node.gpus, site_fabric(site)
    counts = sorted({1, *(2**power for power in range(1, most.bit_length()) if 2**power < most), most})

    def traced() -> tuple[int, str | None, str]:
        from grappe.foresight.search import in_words, on_each_number

        fake_model = fake_model_of(task, submission, gpu=True, records=True)
        device = None if fabric is None else fabric.device
        choices = on_each_number(fake_model, plan, counts, task.batch_size, budget, device)
        plans = {count: str(choice.plan) for count, choice in choices.items() if not isinstance(choice, GrappeError)}
        count = min(plans, default=0)
        return count, plans.get(count), in_words(choices) or f"fits on {count_of(count, 'GPU')} as it is"

    count, text, sentence = _shown("tracing the model, to foresee on how many GPUs it fits", traced)
    if text is None:
        raise UsageError(f"--gpus auto: {submission.task} does not fit on a node of {site.name}: {sentence}")
    job = dataclasses.replace(job, gpus=(count,))
    return with_plan(submission, text, job), (
        f"--gpus auto: {count_of(count, 'GPU')} of {site.name}: {sentence}. Foreseen, not measured on that GPU"
    )


def with_sizes(submission: Submission) -> tuple[Submission, str]:
    """Chooses sizes from a range of --gpus or --nodes; returns a sentence, too.

    A size is one that the plan divides into, and whose memory is not foreseen to be too little. Of the GPUs of a node
    as many are taken as one has free now; of nodes Slurm gives as many as it has, at each start.

    Raises:
        GrappeError: there is no such size, or the plan or the site is wrong.
    """
    job, text = submission.job, ""
    nodes, gpus = job.node_range, job.gpus if isinstance(job.gpus, NumberRange) else None
    ranged = nodes is not None and nodes.most > nodes.least
    if submission.command != TRAIN or submission.task is None or (gpus is None and not ranged):
        return submission, ""
    if gpus is not None:
        text, job = f"--gpus {gpus}", dataclasses.replace(job, gpus=())
        if nodes is not None:
            raise UsageError(f"{text} says how many nodes: leave --nodes {nodes} out")
    site, plan = placed(dataclasses.replace(submission, job=job))
    assert site.node is not None
    if gpus is None or gpus.most > site.node.gpus:
        if gpus is not None:  # of several nodes, each with as many as the fewest have
            nodes = _nodes_for(gpus, site, job.spare, text)
            plan = _stretched(plan, gpus.least, text)
        assert nodes is not None
        text, what, plans = text or f"--nodes {nodes}", "node", sizes(plan, nodes)
    else:
        what, plans = "GPU", {}
        for count in range(max(1, gpus.least), gpus.most + 1):
            with contextlib.suppress(PlanError):
                plans[count] = stretched(plan, count * plan.per_device)
        if not plans:
            _stretched(plan, gpus.most, text)  # its error
    unfit = _unfit(submission, site, dataclasses.replace(job, nodes=nodes and nodes.least), plans)
    fits = [count for count in plans if count not in unfit]
    if not fits:
        raise UsageError(f"{text}: {submission.task} does not fit on any of them: {'; '.join(unfit.values())}")
    if what == "node":
        least, most = fits[0], fits[-1]
        job = dataclasses.replace(job, nodes=NumberRange(least, most), gpus=())
        idle = [str(count) for count in range(least, most) if count not in plans]
        why = f"{plan_name(plans[least])} to {plan_name(plans[most])}, as many as Slurm has at each start"
        why += f"; of {and_more(idle, 4)} some would idle" if idle else ""
    else:
        free = (
            slurm.free_gpus(job.partition) if job.site in (None, current()) else 0
        )  # of another cluster nothing is known
        least = most = max((count for count in fits if count <= free), default=fits[0])
        job = dataclasses.replace(job, gpus=(least,))
        why = plan_name(plans[least]) + (f", and a node has {free} free" if free else ", and no free one is seen")
    why += "".join(f"; not {count_of(count, what)}: {reason}" for count, reason in unfit.items())
    counts = f"{NumberRange(least, most)} {what}{'s' if most > 1 else ''}"
    return with_plan(submission, str(plans[least]), job), f"{text}: {counts}: {why}"


def _nodes_for(gpus: NumberRange, site: Site, spare: int, text: str) -> NumberRange:
    """Returns the numbers of nodes for a range of GPUs; refuses it in GPUs, as it was typed in `text`."""
    assert site.node is not None
    each = max(1, min(gpus.least, site.node.gpus))
    if gpus.least % each:
        raise UsageError(f"{text}: a node of {site.name} has {site.node.gpus} GPUs: begin with a multiple of it")
    nodes = NumberRange(gpus.least // each, gpus.most // each)
    last = (site.node.count or nodes.most + spare) - spare
    spares = f", {spare} of them spare" if spare else ""
    if 0 < last < nodes.least:
        raise UsageError(
            f"{text}: at least {nodes.least + spare} nodes with {each} GPUs each{spares}, and {site.name} has "
            f"{site.node.count}: use at most {last * each} GPUs, or another --partition"
        )
    if 0 < last < nodes.most:
        raise UsageError(
            f"{text}: {nodes.most + spare} nodes with {each} GPUs each{spares}, and {site.name} has "
            f"{site.node.count}: use a range that ends at {last * each}, or another --partition"
        )
    return nodes


def _stretched(plan: Plan, gpus: int, text: str) -> Plan:
    """Returns the plan on a number of GPUs; an error begins with `text`, what the user has typed."""
    try:
        return stretched(plan, gpus * plan.per_device)
    except PlanError as error:
        raise PlanError(f"{text}: {error}") from error


def _unfit(submission: Submission, site: Site, job: JobOptions, plans: Mapping[int, Plan]) -> dict[int, str]:
    """Returns the sizes whose memory is foreseen to be too little, with a reason each; none if unknown."""
    fewest = next(iter(plans.values()))
    budget = budget_for(site, layout(fewest, site, job), fewest)
    assert submission.task is not None
    try:
        task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    except (ImportError, TaskError):
        return {}
    if budget is None:
        return {}

    def traced(budget: MemoryBudget = budget) -> dict[int, str]:
        fake_model = fake_model_of(task, submission, gpu=True, records=True)
        return {count: _asked(fake_model, plan, budget) for count, plan in plans.items()}

    reasons = _shown("tracing the model, to foresee the memory that each size needs", traced)
    return {int(count): reason for count, reason in reasons.items() if reason}


def warnings_of(fake_model: FakeModel, plan: Plan, budget: MemoryBudget, site: Site) -> list[str]:
    """Returns warnings about a plan's memory and about its use of a site's GPU.

    Args:
        fake_model: made with `records`.

    Raises:
        TaskError: the task cannot be traced.
    """
    return list(filter(None, [memory_judged(fake_model, plan, budget), _idle(fake_model, plan, site)]))


def _idle(fake_model: FakeModel, plan: Plan, site: Site) -> str:
    """Returns a warning if a step of the plan keeps a GPU busy for a small share of its time; "" otherwise."""
    from grappe.foresight.gpu_time import gpu_time
    from grappe.verbs.foresee.foresee import BUSY, share_of_gpu, site_fabric

    fabric = site_fabric(site)
    if fabric is None or plan.per_device > 1:
        return ""
    try:
        share = share_of_gpu(gpu_time(fake_model, plan, fabric))
    except TaskError:
        raise
    except GrappeError:
        return ""  # such a plan's time is not foreseen
    if share >= BUSY:
        return ""
    return (
        f"a step would use {share:.0%} of a GPU ({fabric.device.title}), which mostly waits for its host: train on "
        "cores (--gpus 0), take a larger batch_size, or let several trainings share a GPU (per_device). Foreseen from "
        "the data sheet, not measured on that GPU; see grappe foresee"
    )


def budget_for(site: Site, layout: Layout, plan: Plan) -> MemoryBudget | None:
    """Returns a process's share of its GPU's memory; None: there is no GPU, or its memory is unknown."""
    from grappe.verbs.foresee.foresee import budget_in

    budget = budget_in(site)
    if budget is None or not layout.gpus:
        return None
    if (sharing := plan.per_device) > 1:
        whose = f"{budget.whose}, shared by {sharing} processes,"
        return dataclasses.replace(budget, whose=whose, size=budget.size // sharing)
    return budget


def not_foreseen(error: GrappeError) -> str:
    """Returns a message: why the memory is unknown."""
    return f"the memory that the plan needs was not foreseen: {error}"


def memory_judged(fake_model: FakeModel, plan: Plan, budget: MemoryBudget) -> str:
    """Returns a warning and a plan that fits, if this one does not; "" otherwise."""
    asked = _asked(fake_model, plan, budget)
    if not asked:
        return ""
    try:
        other = _another(fake_model, plan, budget)
    except Exception:  # of time, of memory: then without advice
        return f"{asked} (foreseen, not measured on that GPU; see grappe foresee)"
    return f"{asked}. {other} (foreseen, not measured on that GPU; see grappe foresee)"


def _asked(fake_model: FakeModel, plan: Plan, budget: MemoryBudget) -> str:
    """Returns a warning if the plan will not fit; "" otherwise."""
    from grappe.foresight.search import foreseen

    forecast = foreseen(fake_model, plan, fake_model.task.batch_size, budget)
    if forecast.fits is not False or forecast.needs is None:
        return ""
    processes = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    return (
        f"with {processes}, each needs {format_bytes(budget.taken(forecast.needs))}, and {budget.whose} has "
        f"{format_bytes(budget.size)}: it will run out of memory"
    )


def _another(fake_model: FakeModel, plan: Plan, budget: MemoryBudget) -> str:
    """Names the first plan that fits: of as many processes, or else of more."""
    from grappe.foresight.search import fitting

    other = fitting(fake_model, plan, budget)
    if other is None or other.needs is None:
        return "No plan of as many GPUs fits, nor of 8 times as many: take a smaller batch_size"
    takes = format_bytes(budget.taken(other.needs))
    if other.processes == plan.processes:
        return f"--plan {other.plan} fits, with {takes}"
    return f"No plan of as many GPUs fits; with {other.processes} GPUs --plan {other.plan} does, with {takes} each"


def fake_model_of(task: Task, submission: Submission, *, gpu: bool, records: bool = False) -> FakeModel:
    """Makes the fake model of a training that is to be submitted, in the process that traces it.

    Args:
        gpu: whether it runs on GPUs.
        records: whether times are foreseen from it.
    """
    import torch

    from grappe.foresight.fake_model import FakeModel
    from grappe.training.request import data_folder

    torch.set_num_threads(1)
    folder = data_folder(None if submission.data is None else Path(submission.data))
    return FakeModel(task, folder, foreach=gpu, kernels=None, records=records)


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
    text = "tracing the model, to foresee the time and the memory that the plan needs"
    trace = _shown(text, lambda: _traced(job, plan, fabric))
    if fabric is not None:
        seconds, spread = trace["seconds"], trace["spread"]
        origin = f"from the data sheet of {fabric.device.title}, not measured, at its slow end"
    else:
        progress("running a few steps, to measure the time that they take")
        try:
            step = _measured(job, plan)
        finally:
            progress("")
        seconds, spread = step.total, step.spread
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
    from grappe.verbs.foresee.measured_step import measured_step

    submission = job.submission
    assert submission.task is not None
    start_server()
    task = TaskReference.of(submission.task, split(submission.fields))
    return measured_step(task, plan, data_folder(None if submission.data is None else Path(submission.data)))


def _traced(job: _Job, plan: Plan, fabric: Fabric | None) -> dict[str, Any]:
    """Traces the model once; returns a GPU's step, the training's sizes, and the warnings."""
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
    return {
        "seconds": seconds,
        "spread": spread,
        "saved": sum(sizes),
        "evaluated": fake_model.validation_samples / batch,
        "steps_per_epoch": math.ceil(fake_model.samples / job.task.batch_size),
        "warnings": warnings,
    }


def _limit_in_words(
    job: _Job, estimate: _Estimate, remaining: RemainingTraining, needed: float, limit: int, *, capped: bool
) -> str:
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
