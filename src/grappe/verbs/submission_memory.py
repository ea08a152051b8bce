"""Says before the queue that a training's peak memory does not fit a site's GPUs, and which plan of it would."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, TaskError
from grappe.fields import split
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.sites.sbatch import TRAIN
from grappe.sites.script import Script
from grappe.verbs.foresee.limited import in_limited_process
from grappe.verbs.submit.submission import Submission

if TYPE_CHECKING:
    from grappe.foresight.search import Room
    from grappe.foresight.sketch import Sketch
    from grappe.sites.layout import Layout
    from grappe.sites.schema import Site
    from grappe.task import Task


def memory_warning(submission: Submission, script: Script) -> str | None:
    """Returns a warning if the plan of a training's job is foreseen to need more than a GPU of the site has.

    The model is traced in a process of its own, on tensors without memory. Where that is not possible, the warning
    says why. None: the plan fits, or it is not known what a GPU of the site has.
    """
    from grappe.training.task_reference import TaskReference

    room = room_for(script.site, script.layout, script.plan)
    if submission.command != TRAIN or submission.task is None or room is None:
        return None
    try:
        task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    except (ImportError, TaskError):
        return None  # the job has packages that are not here
    progress("tracing the model, to foresee the memory that the plan needs")
    try:
        return (
            in_limited_process(
                lambda: memory_judged(sketch_of(task, submission, gpu=True), script.plan, room)
            )
            or None
        )
    except GrappeError as error:
        return not_foreseen(error)


def room_for(site: Site, layout: Layout, plan: Plan) -> Room | None:
    """Returns the memory that a process has of a job's GPU; None: there is no GPU, or its memory is not known."""
    from grappe.verbs.foresee.foresee import room_in

    room = room_in(site)
    if room is None or not layout.gpus:
        return None
    if (sharing := plan.per_device) > 1:
        whose = f"{room.whose}, shared by {sharing} processes,"
        return dataclasses.replace(room, whose=whose, size=room.size // sharing)
    return room


def not_foreseen(error: GrappeError) -> str:
    """Says why the memory is not known."""
    return f"the memory that the plan needs was not foreseen: {error}"


def memory_judged(sketch: Sketch, plan: Plan, room: Room) -> str:
    """Says that the plan does not fit, and which does; "" if it does, or if that cannot be known."""
    asked = _asked(sketch, plan, room)
    if not asked:
        return ""
    try:
        other = _another(sketch, plan, room)
    except Exception:  # of time, of memory: then without advice
        return f"{asked} (foreseen, not measured on that GPU; see grappe foresee)"
    return f"{asked}. {other} (foreseen, not measured on that GPU; see grappe foresee)"


def _asked(sketch: Sketch, plan: Plan, room: Room) -> str:
    """Says that the plan does not fit; "" if it does, or if that cannot be known."""
    from grappe.foresight.search import foreseen
    from grappe.words import format_bytes

    found = foreseen(sketch, plan, sketch.task.batch_size, room)
    if found.fits is not False or found.needs is None:
        return ""
    processes = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    return (
        f"with {processes}, each needs {format_bytes(room.taken(found.needs))}, and {room.whose} has "
        f"{format_bytes(room.size)}: it will run out of memory"
    )


def _another(sketch: Sketch, plan: Plan, room: Room) -> str:
    """Names the first plan that fits: of as many processes, or else of more."""
    from grappe.foresight.search import fitting
    from grappe.words import format_bytes

    found = fitting(sketch, plan, room)
    if found is None or found.needs is None:
        return "No plan of as many GPUs fits, nor of 8 times as many: take a smaller batch_size"
    takes = format_bytes(room.taken(found.needs))
    if found.processes == plan.processes:
        return f"--plan {found.plan} fits, with {takes}"
    return f"No plan of as many GPUs fits; with {found.processes} GPUs --plan {found.plan} does, with {takes} each"


def sketch_of(task: Task, submission: Submission, *, gpu: bool, records: bool = False) -> Sketch:
    """Makes the sketch of a training that is to be submitted, in the process that traces it.

    Args:
        gpu: whether it runs on GPUs.
        records: whether times are foreseen from it.
    """
    import torch

    from grappe.foresight.sketch import Sketch
    from grappe.training.request import data_folder

    torch.set_num_threads(1)
    folder = data_folder(None if submission.data is None else Path(submission.data))
    return Sketch(task, folder, foreach=gpu, kernels=None, records=records)
