"""Foresees plans: states and peak memory of a process, whether a site's GPUs have room, and the time of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import UsageError
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference

if TYPE_CHECKING:
    from grappe.foresight.search import Room
    from grappe.sites.schema import Site
    from grappe.verbs.foresee.times import Times

GPU_MEMORY = re.compile(r"((?:\d+ or )*\d+) ?GB")


def room_of(site: str) -> Room:
    """Reads the memory of a site's GPU.

    Raises:
        UsageError: the site is unknown, or its GPU's memory is.
    """
    from grappe.sites import find

    room = room_in(find(site))
    if room is None:
        raise UsageError(
            f"--site={site}: it names no GPU's memory; leave --site out, and compare with your device's own"
        )
    return room


def room_in(site: Site) -> Room | None:
    """Reads the memory of a site's GPU; None: the site does not name it."""
    from grappe.foresight.search import Room

    node = site.node
    found = GPU_MEMORY.search(node.gpu) if node is not None and node.gpus else None
    if node is None or found is None:
        return None
    smallest = min(map(int, found[1].split(" or ")))  # a job may get either
    return Room(whose=f"{site.name}'s {node.gpu}", size=smallest * 10**9)


def foresee(
    task: Task | type[Task] | str,
    plans: Sequence[Plan | str] = (),
    *,
    gpus: Sequence[int] = (),
    batch_size: Sequence[int] = (),
    site: str | None = None,
    fields: Mapping[str, str] | None = None,
    data: Path | str | None = None,
) -> Times:
    """Foresees each plan's memory and time at each batch size; without plans, some that train the same on `gpus`.

    Nothing is trained: the model is traced on tensors without memory. On a CPU the kernels that need memory of their
    own are run once each, in a process of their own. Times are of this machine, from its calibration: operators that
    it lacks are run; or of a site's GPU, from the data sheet.

    Raises:
        TaskError: the task cannot be traced.
        UsageError: no plan can be foreseen, or the site is not known.
    """
    from grappe.data.prepare import prepare
    from grappe.foresight.kernels import Kernels
    from grappe.foresight.search import candidates, foreseen
    from grappe.foresight.sketch import Sketch
    from grappe.launch.world import cores
    from grappe.sites import find
    from grappe.verbs.foresee.times import timed

    room = None if site is None else room_of(site)
    wanted = [as_plan(plan) for plan in plans] or list(candidates(gpus or (1, 2, 4, 8)))
    made = TaskReference.of(task, fields).resolve()
    folder = data_folder(data)
    prepare(made, folder)
    # Operators are of no use where this machine has too few cores for any of the plans.
    records = room is not None or any(plan.processes <= cores() for plan in wanted)
    kernels = None if room else Kernels()
    sketch = Sketch(made, folder, foreach=room is not None, kernels=kernels, records=records)
    batches = batch_size or (made.batch_size,)
    found = [foreseen(sketch, plan, batch, room) for batch in batches for plan in wanted]
    if all(one.needs is None for one in found):
        raise UsageError("; ".join(dict.fromkeys(one.why for one in found)))
    return timed(sketch, found, None if site is None else find(site))
