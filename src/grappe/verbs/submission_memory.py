"""Warns before the queue of a peak memory that does not fit a site's GPUs, and of GPUs that would mostly wait."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, TaskError
from grappe.fields import split
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.sites.sbatch import TRAIN
from grappe.sites.script import Script
from grappe.verbs.foresee.limited import in_limited_process
from grappe.verbs.submit.resources import Submission

if TYPE_CHECKING:
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.search import MemoryBudget
    from grappe.sites.layout import Layout
    from grappe.sites.schema import Site
    from grappe.task import Task


def foreseen_warnings(submission: Submission, script: Script) -> list[str]:
    """Returns warnings if a training's job is foreseen to need more memory than its GPUs have, or to leave them idle.

    The model is traced in a process of its own, on tensors without memory. Where that is not possible, the warning
    says why. None are returned of a job without GPUs, or of GPUs whose memory is unknown.
    """
    from grappe.training.task_reference import TaskReference

    budget = budget_for(script.site, script.layout, script.plan)
    if submission.command != TRAIN or submission.task is None or budget is None:
        return []
    try:
        task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    except (ImportError, TaskError):
        return []  # the job has packages that are not here

    def traced() -> str:
        fake_model = fake_model_of(task, submission, gpu=True, records=True)
        return json.dumps(warnings_of(fake_model, script.plan, budget, script.site))

    progress("tracing the model, to foresee the memory that the plan needs")
    try:
        return json.loads(in_limited_process(traced))
    except GrappeError as error:
        return [not_foreseen(error)]
    finally:
        progress("")


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
    from grappe.words import format_bytes

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
    from grappe.words import format_bytes

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
