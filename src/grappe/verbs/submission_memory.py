"""Says before the queue that a training's peak memory does not fit a site's GPUs, and which plan of it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, TaskError
from grappe.fields import split
from grappe.plan import Plan
from grappe.sites.schema import Site
from grappe.verbs.job_resources import laid_out, requests
from grappe.verbs.submission import TRAIN, Submission

if TYPE_CHECKING:
    from grappe.task import Task
    from grappe.verbs.foresee.foresee import Foreseen, Room

SECONDS = 60  # of computing, for tracing a model
MEMORY_BYTES = 4_000_000_000


def memory_warnings(submission: Submission) -> Iterator[str]:
    """Yields a warning for each job whose plan is foreseen to need more than a GPU of the site has.

    The model is traced in a process of its own, on tensors without memory. Where that is not possible, a line says why.
    """
    if submission.command != TRAIN or submission.task is None:
        return
    for request in requests(submission):
        layout, site, plan = laid_out(submission, request)
        if layout.gpus and _names_memory(site):
            yield from _warning(submission, site, plan)


def _names_memory(site: Site) -> bool:
    from grappe.verbs.foresee.foresee import GPU_MEMORY

    return site.node is not None and GPU_MEMORY.search(site.node.gpu) is not None


def _warning(submission: Submission, site: Site, plan: Plan) -> Iterator[str]:
    from grappe.launch.fork import run_in_fork
    from grappe.launch.limits import LimitReached, Limits
    from grappe.training.task_reference import TaskReference

    try:
        task = TaskReference.of(submission.task or "", split(submission.fields)).resolve()
    except (ImportError, TaskError):
        return  # either the job's script is refused with these words, or the job has packages that are not here
    limits = Limits(memory=MEMORY_BYTES, mapped=1 << 40, seconds=SECONDS)
    try:
        if text := run_in_fork(lambda: _judged(task, submission, site, plan), limits):
            yield text
    except LimitReached:
        yield (
            f"the memory that the plan needs was not foreseen: tracing the model takes more than {SECONDS} s "
            "or 4 GB here; grappe foresee has no such limit"
        )
    except GrappeError as error:
        yield f"the memory that the plan needs was not foreseen: {error}"


def _judged(task: Task, submission: Submission, site: Site, plan: Plan) -> str:
    """Returns the warning; "" if the plan fits, or if that cannot be known."""
    import torch

    from grappe.foresight.sketch import Sketch
    from grappe.training.request import data_folder
    from grappe.verbs.foresee.foresee import foreseen, room_of

    torch.set_num_threads(1)
    folder = data_folder(None if submission.data is None else Path(submission.data))
    room = room_of(site.name)
    sketch = Sketch(task, folder, foreach=True, kernels=None)
    asked = foreseen(sketch, plan, task.batch_size, room)
    if asked.fits is not False or asked.needs is None:
        return ""
    others = (foreseen(sketch, other, task.batch_size, room) for other in _others(plan))
    return _sentence(asked, next((one for one in others if one.fits), None), room)


def _others(plan: Plan) -> Iterator[Plan]:
    """Yields plans of as many processes that learn the same, those that cost least first."""
    from grappe.verbs.foresee.foresee import candidates

    whole = plan.replicate * plan.shard
    for other in candidates([whole]):
        yield dataclasses.replace(
            plan,
            replicate=other.replicate,
            shard=other.shard,
            zero=other.zero,
            microbatches=max(plan.microbatches, other.microbatches),
            recompute=plan.recompute or other.recompute,
        )


def _sentence(asked: Foreseen, other: Foreseen | None, room: Room) -> str:
    from grappe.profiling.memory import size

    def taken(one: Foreseen) -> str:
        assert one.needs is not None
        return size(room.needed(one.needs.states.total if one.needs.peak is None else one.needs.peak))

    advice = (
        f"--plan {other.plan} fits, with {taken(other)}"
        if other is not None
        else "no plan of as many GPUs fits: take more of them, or a smaller batch_size"
    )
    return (
        f"each process needs {taken(asked)}, and {room.whose} has {size(room.size)}: it will run out of memory. "
        f"{advice} (foreseen, not measured on that GPU; see grappe foresee)"
    )
