"""Forecast of a job before its queue: GPUs and sizes that fit, the limit of --time auto, warnings of what does not."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grappe.contrib.slurm import slurm
from grappe.contrib.slurm.environment import MADE_ON_NODES
from grappe.contrib.slurm.resources import Submission, placed, with_plan
from grappe.contrib.slurm.script import Script, clock, figure
from grappe.errors import GrappeError, PlanError, TaskError, UsageError
from grappe.fields import NumberRange
from grappe.launch.terminal import progress
from grappe.plan import ONE_PROCESS, Plan
from grappe.sites import current
from grappe.sites.layout import hourly_charge, layout, longest, sizes, sliced, stretched
from grappe.sites.sbatch import AUTO, FEWEST, TRAIN, JobOptions
from grappe.sites.schema import Site
from grappe.training.request import data_folder
from grappe.training.watchers.expected_end import span
from grappe.verbs.foresee import training_time
from grappe.verbs.foresee.foresee import WORTH, budget_in, site_fabric
from grappe.verbs.foresee.run_forecast import traced
from grappe.words import and_more, count_of, format_bytes, format_seconds, plan_name

if TYPE_CHECKING:
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.gpu_time import Fabric
    from grappe.foresight.search import MemoryBudget
    from grappe.task import Task

MADE_SECONDS, HERE_SECONDS = 600.0, 120.0
"""From the job's start to the command's: to make an environment on the nodes and examine them, or to examine them."""
START_SECONDS = 60.0  # of a process that was not measured: imports from a file system of a cluster
OF_A_STEP = 0.5  # of the time that training takes for as many samples: what an evaluation takes at most
WRITTEN = 2e8  # bytes/s of a checkpoint


def foreseen_warnings(submission: Submission, script: Script) -> list[str]:
    """Returns warnings if a training's job is foreseen to need more memory than its GPUs have, or to leave them idle.

    The model is traced in a process of its own, on tensors without memory. Where that is not possible, the warning
    says why. None are returned of a job without GPUs, or of GPUs whose memory is unknown.
    """
    budget = budget_for(script.site, script.plan)
    task = None if budget is None else _loaded(submission)
    if budget is None or task is None:
        return []
    try:
        return traced(
            "tracing the model, to foresee the memory that the plan needs",
            lambda: warnings_of(fake_model_of(task, submission), script.plan, budget, script.site, submission.job),
        )
    except GrappeError as error:
        return [not_foreseen(error)]


def _loaded(submission: Submission) -> Task | None:
    """Loads the task of a training; None: it is none, or the job has packages that are not here."""
    if submission.command != TRAIN:
        return None
    with contextlib.suppress(ImportError, TaskError):
        return submission.reference.resolve()
    return None


def with_gpus(submission: Submission) -> tuple[Submission, str]:
    """Finds the slice, or the number of GPUs and the plan, for --gpus auto; returns a sentence, too.

    A slice is taken if one is enough (see `smallest_slice`), or else the smallest number of a node's GPUs whose memory
    is, with as little recomputation as possible.

    Raises:
        GrappeError: none is enough, the memory is unknown or cannot be foreseen, or the plan has several processes.
    """
    job = submission.job
    if job.gpus != FEWEST or submission.command != TRAIN:
        return submission, ""
    site, plan = placed(dataclasses.replace(submission, job=dataclasses.replace(job, gpus=())))
    budget, fabric = budget_in(site), site_fabric(site)
    if plan.processes > 1 or plan.recompute or plan.memory != "none" or plan.device == "cpu":
        raise UsageError(f"--gpus auto chooses processes and recomputation: leave them out of --plan {plan}")
    if budget is None or site.node is None:
        raise UsageError(f"--gpus auto: the memory of {site.name}'s GPUs is unknown: give a number, as --gpus 2")
    task, most = submission.reference.resolve(), site.node.gpus
    counts = sorted({1, *(2**power for power in range(1, most.bit_length()) if 2**power < most), most})

    def choose() -> tuple[int | str, str | None, str]:
        from grappe.foresight.search import in_words, on_each_number

        device, fake_model = None if fabric is None else fabric.device, fake_model_of(task, submission)
        if chosen := smallest_slice(fake_model, plan, site, job):
            return chosen[0], str(plan), chosen[1]
        choices = on_each_number(fake_model, plan, counts, task.batch_size, budget, device)
        plans = {count: choice.plan for count, choice in choices.items() if not isinstance(choice, GrappeError)}
        count = min(plans, default=0)
        words = [in_words(choices) or f"fits on {count_of(count, 'GPU')} as it is"]
        for number in [number for number in counts if number >= count > 0][:2]:
            price = _price(fake_model, stretched(plans[count], number), site, job)
            words += [f"{count_of(number, 'GPU')}: {price}"] if price else []
        return count, str(plans[count]) if count else None, "; ".join(words)

    count, text, sentence = traced("tracing the model, to foresee on how many GPUs it fits", choose)
    if text is None:
        raise UsageError(f"--gpus auto: {submission.task} does not fit on a node of {site.name}: {sentence}")
    what = f"slice {count}" if isinstance(count, str) else count_of(count, "GPU")
    return with_plan(submission, text, dataclasses.replace(job, gpus=(count,))), (
        f"--gpus auto: {what} of {site.name}: {sentence}. Foreseen, not measured on that GPU"
    )


def smallest_slice(fake_model: FakeModel, plan: Plan, site: Site, job: JobOptions) -> tuple[str, str] | None:
    """Chooses the slice of least charge that is enough for a plan of one process; None: none is, or the site has none.

    It is enough if the foreseen memory fits, and if a step uses a smaller share of the GPU than the slice has.

    Returns:
        The slice's name, and a sentence: its room, its charge, and those of the next larger one.
    """
    from grappe.foresight.search import foreseen

    if not site.slice or job.nodes or job.spare or (share := _share(fake_model, plan, site)) is None:
        return None
    places = {part: sliced(site, part.name) for part in site.slice}
    parts = sorted(places, key=lambda part: (hourly_charge(plan, places[part], job) or 0.0, part.gpu_gb))
    for part, larger in itertools.pairwise([*parts, None]):
        assert part is not None
        place, budget = places[part], budget_in(places[part])
        forecast = foreseen(fake_model, plan, fake_model.task.batch_size, budget)
        if budget and forecast.fits and forecast.needs and share < part.fraction:
            other = f"the next larger, {larger.name}" if larger else "a whole GPU"
            return part.name, (
                f"takes {format_bytes(budget.taken(forecast.needs))} of {format_bytes(budget.size)}, and {share:.1%} "
                f"of a GPU, of which it has {part.fraction:.0%}: {_price(fake_model, plan, place, job)}; "
                f"{other}: {_price(fake_model, plan, places[larger] if larger else site, job)}"
            )
    return None


def _share(fake_model: FakeModel, plan: Plan, site: Site) -> float | None:
    """Computes the share of a site's GPU that a step uses; None: the time of such a plan or GPU is not foreseen."""
    from grappe.foresight.gpu_time import gpu_time

    fabric = site_fabric(site)
    try:
        return None if fabric is None else gpu_time(fake_model, plan, fabric).gpu_share()
    except PlanError:
        return None


def _price(fake_model: FakeModel, plan: Plan, site: Site, job: JobOptions) -> str:
    """Says what an hour of a plan costs in the site's unit, and how long a step takes, as far as they are known."""
    from grappe.foresight.gpu_time import gpu_time

    units, fabric, parts = hourly_charge(plan, site, job), site_fabric(site), list[str]()
    if units is not None and site.charge is not None:
        parts.append(f"{figure(units)} {site.charge.unit} an hour")
    with contextlib.suppress(PlanError):
        if fabric is not None:
            parts.append(f"a step of {format_seconds(gpu_time(fake_model, plan, fabric).total)}")
    return ", ".join(parts)


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
    if submission.command != TRAIN or (gpus is None and not ranged):
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
    unfit = _unfit(submission, site, plans)
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
        # Of another cluster nothing is known.
        free = slurm.free_gpus(job.partition) if job.site in (None, current()) else 0
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


def _unfit(submission: Submission, site: Site, plans: Mapping[int, Plan]) -> dict[int, str]:
    """Returns the sizes whose memory is foreseen to be too little, with a reason each; none if unknown."""
    budget, task = budget_for(site, next(iter(plans.values()))), _loaded(submission)
    if budget is None or task is None:
        return {}

    def judge(budget: MemoryBudget = budget) -> dict[int, str]:
        fake_model = fake_model_of(task, submission)
        return {count: _asked(fake_model, plan, budget) for count, plan in plans.items()}

    reasons = traced("tracing the model, to foresee the memory that each size needs", judge)
    return {int(count): reason for count, reason in reasons.items() if reason}


def warnings_of(fake_model: FakeModel, plan: Plan, budget: MemoryBudget, site: Site, job: JobOptions) -> list[str]:
    """Returns warnings about a plan's memory and about its use of a site's GPU.

    Args:
        fake_model: made with `records`.

    Raises:
        TaskError: the task cannot be traced.
    """
    warnings = [*_idle(fake_model, plan, budget, site, job), *filter(None, [fake_model.absent])]
    if asked := _asked(fake_model, plan, budget):
        if site.node and site.node.slice:
            return [f"{asked}: take a larger slice, or --gpus 1 (foreseen, not measured on that GPU)", *warnings]
        try:
            other = _another(fake_model, plan, budget)
        except Exception:  # of time, of memory: then without advice
            return [f"{asked} (foreseen, not measured on that GPU; see grappe foresee)", *warnings]
        return [f"{asked}. {other} (foreseen, not measured on that GPU; see grappe foresee)", *warnings]
    return warnings


def _idle(fake_model: FakeModel, plan: Plan, budget: MemoryBudget, site: Site, job: JobOptions) -> list[str]:
    """Returns a warning if a step of the plan uses a small share of its GPU, with a smaller request that is enough."""
    from grappe.foresight.search import foreseen

    fabric = site_fabric(site)
    if fabric is None or plan.per_device > 1 or (site.node and site.node.slice):
        return []
    if (share := _share(fake_model, plan, site)) is None or share >= WORTH:
        return []
    title, needs = fabric.device.title, foreseen(fake_model, plan, fake_model.task.batch_size, budget).needs
    if needs is not None and (smaller := _smaller(fake_model, plan, budget, site, job)):
        price = _price(fake_model, plan, site, dataclasses.replace(job, gpus=()))
        return [
            f"a step would use {share:.0%} of a GPU ({title}), and {format_bytes(budget.taken(needs))} of its "
            f"{format_bytes(budget.size)}: {smaller[0]} is enough ({smaller[1]} instead of {price}). Or train on cores "
            "(--gpus 0), or take a larger batch_size. Foreseen from the data sheet, not measured on that GPU"
        ]
    return [
        f"a step would use {share:.0%} of a GPU ({title}): train on cores (--gpus 0), take a larger batch_size, or "
        "place several processes on a GPU (per_device). Foreseen from the data sheet, not measured on that GPU; "
        "grappe foresee says how many fit"
    ]


def _smaller(
    fake_model: FakeModel, plan: Plan, budget: MemoryBudget, site: Site, job: JobOptions
) -> tuple[str, str] | None:
    """Finds the option for less than an underused plan's GPUs, a slice or a half, a quarter of them; and its price."""
    from grappe.foresight.search import foreseen

    by_gpus, job, smaller = bool(job.gpus), dataclasses.replace(job, gpus=()), plan
    if plan.processes == 1:
        part = smallest_slice(fake_model, plan, site, job)
        return part and (f"--gpus {part[0]}", _price(fake_model, plan, sliced(site, part[0]), job))
    with contextlib.suppress(PlanError):
        while smaller.processes % 2 == 0 and (_share(fake_model, smaller, site) or 1.0) < WORTH:
            half = stretched(smaller, smaller.processes // 2)
            if not foreseen(fake_model, half, fake_model.task.batch_size, budget).fits:
                break
            smaller = half
    option = f"--gpus {smaller.processes}" if by_gpus else f"--plan {str(smaller) or ONE_PROCESS}"
    price = _price(fake_model, smaller, site, dataclasses.replace(job, nodes=None))
    return None if smaller is plan else (option, price)


def budget_for(site: Site, plan: Plan) -> MemoryBudget | None:
    """Returns a process's share of its GPU's memory; None: there is no GPU, or its memory is unknown."""
    budget = None if plan.device == "cpu" else budget_in(site)
    return budget and budget.of_each(plan.per_device)


def not_foreseen(error: GrappeError) -> str:
    """Returns a message: why the memory is unknown."""
    return f"the memory that the plan needs was not foreseen: {error}"


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


def fake_model_of(task: Task, submission: Submission, *, gpu: bool = True) -> FakeModel:
    """Makes the fake model of a training that is to be submitted, in the process that traces it.

    Args:
        gpu: whether it runs on GPUs, whose times are foreseen from the trace.
    """
    import torch

    from grappe.foresight.fake_model import FakeModel

    torch.set_num_threads(1)
    return FakeModel(task, data_folder(submission.data), foreach=gpu, kernels=None, records=gpu)


def with_time(submission: Submission) -> tuple[Submission, str, tuple[str, ...] | None]:
    """Adds the time limit for --time auto; a limit that the user set stays.

    Returns:
        Also a sentence on the limit and its source, "" for the user's own; and warnings about the memory and the GPU's
        use, from the same trace. None: nothing was traced.

    Raises:
        UsageError: the training's time is unknown; the message says what to do.
        GrappeError: the submission is wrong, or the site forbids it.
    """
    job = submission.job
    if job.time != AUTO:
        return submission, "", None
    site, plan = placed(submission)
    words = shlex.join((submission.command, *submission.arguments))
    advice = (
        "Give a limit, as --time 3h; or try some steps first, after which --time auto knows them: "
        f"grappe submit --time 15m … -- {words} --steps 100"
    )
    try:
        task = submission.reference.resolve()
    except (ImportError, TaskError) as error:
        raise UsageError(f"--time auto: the task cannot be loaded here ({error}): {advice}") from error
    least = 60 * (site.ask.min_minutes or 1)
    resources = layout(plan, site, dataclasses.replace(job, time=f"{least}s"))
    here = job.site in (None, current()) and resources.nodes == 1
    here = here and site.node is not None and site.node.cores == os.cpu_count()
    query = training_time.RunQuery(task=task, plan=plan, site=site, layout=resources, here=here)
    estimate = training_time.earlier_run(query, job.runs, submission.run, submission.options)
    if estimate is None:
        try:
            estimate = _foreseen(submission, query)
        except GrappeError as error:
            raise UsageError(
                f"--time auto: no run in {job.runs} has measured this task with this plan on such a device, and its "
                f"time cannot be foreseen: {error}. {advice}"
            ) from None
    remaining = training_time.RemainingTraining.of(
        submission.options,
        done=training_time.steps_done(submission.run) or submission.epochs_done * estimate.steps_per_epoch,
        epochs=task.epochs,
        steps_per_epoch=estimate.steps_per_epoch,
    )
    made = (job.env or site.job.environment) in MADE_ON_NODES
    needed = estimate.seconds(remaining) + (MADE_SECONDS if made else HERE_SECONDS)
    limit = training_time.time_limit(needed, least, longest(resources, site, job))
    slow = estimate.step / (1 - estimate.spread)
    text = (
        f"time limit {clock(limit)}: {remaining.steps:,} steps of {format_seconds(slow)} and "
        f"{count_of(remaining.evaluations, 'evaluation')}, {estimate.origin}, with start-up"
    )
    if limit >= needed * (1 + training_time.MARGIN):
        text = f"{text} and a margin"
    else:
        text = f"{text}, take {span(needed)}, and {site.name} gives at most that limit"
        if job.chain or not site.job.requeue:
            text = f"{text}: its jobs do not go back into the queue, so submit --chain {math.ceil(needed / limit)}"
        else:
            text = f"{text}: the job saves before its end, goes back into the queue and resumes"
    timed = dataclasses.replace(submission, job=dataclasses.replace(job, time=f"{limit}s"))
    return timed, text, estimate.warnings


def _foreseen(submission: Submission, query: training_time.RunQuery) -> training_time.TimeEstimate:
    """Foresees the training's time: on GPUs from a trace and the data sheet; on cores like these from a few steps here.

    The memory is judged from the same trace.
    """
    fabric, plan = None, dataclasses.replace(query.plan, threads=query.plan.threads or query.layout.cores)
    if query.layout.gpus:
        fabric = site_fabric(query.site)
        if fabric is None:
            gpu = query.site.node.gpu if query.site.node else ""
            raise UsageError(
                f"grappe has no data sheet of {query.site.name}'s GPU ({gpu}): run grappe measure in a job there"
            )
    elif not query.here:
        raise UsageError(f"the nodes of {query.site.name} seem to have other CPUs than this machine")
    text = "tracing the model, to foresee the time and the memory that the plan needs"
    trace = traced(text, lambda: _traced(submission, query, plan, fabric))
    if fabric is not None:
        seconds, spread = trace["seconds"], trace["spread"]
        origin = f"from the data sheet of {fabric.device.title}, not measured, at its slow end"
    else:
        from grappe.launch.local import start_server
        from grappe.verbs.foresee.measured_step import measured_step

        progress("running a few steps, to measure the time that they take")
        try:
            start_server()
            step = measured_step(submission.reference, plan, data_folder(submission.data))
        finally:
            progress("")
        seconds, spread = step.total, step.spread
        origin = "as measured on this machine, at the slow end, if the job's cores are as fast as these"
    return training_time.TimeEstimate(
        step=seconds,
        evaluation=OF_A_STEP * seconds * trace["evaluated"],
        save=trace["saved"] / WRITTEN,
        start=START_SECONDS,
        spread=spread,
        steps_per_epoch=trace["steps_per_epoch"],
        origin=origin,
        warnings=tuple(trace["warnings"]),
    )


def _traced(submission: Submission, query: training_time.RunQuery, plan: Plan, fabric: Fabric | None) -> dict[str, Any]:
    """Traces the model once; returns a GPU's step, the training's sizes, and the warnings."""
    from grappe.foresight.forecast import memory_forecast
    from grappe.foresight.gpu_time import gpu_time
    from grappe.verbs.foresee.measured_step import check_runs_here

    task = query.task
    fake_model = fake_model_of(task, submission, gpu=fabric is not None)
    step = None if fabric is None else gpu_time(fake_model, query.plan, fabric)
    if step is None:
        check_runs_here(plan, memory_forecast(fake_model, plan))
    budget, warnings = budget_for(query.site, query.plan), list[str]()
    if budget is not None:
        try:
            warnings = warnings_of(fake_model, query.plan, budget, query.site, submission.job)
        except GrappeError as error:
            warnings = [not_foreseen(error)]
    sizes = (parameter.size + sum((*parameter.states, *parameter.whole_states)) for parameter in fake_model.parameters)
    return {
        "seconds": step and step.total,
        "spread": step and step.spread,
        "saved": sum(sizes),
        "evaluated": fake_model.validation_samples / min(task.batch_size, fake_model.samples),
        "steps_per_epoch": math.ceil(fake_model.samples / task.batch_size),
        "warnings": warnings,
    }
