"""Foresees plans: states and peak memory of a process, and whether a site's GPUs have room for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, TaskError, UsageError
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference

if TYPE_CHECKING:
    from grappe.foresight.compose import Needs
    from grappe.foresight.sketch import Sketch
    from grappe.sites.schema import Site

GPU_MEMORY = re.compile(r"((?:\d+ or )*\d+) ?GB")
CONTEXT_BYTES = 1_500_000_000  # of a GPU: CUDA's context and libraries, and NCCL's buffers
MARGIN = 1.1  # of a GPU's peak: what its allocator cannot use between blocks, and kernels' workspace
MEASURES = (
    "",
    "microbatches=4",
    "recompute",
    "recompute,microbatches=4",
)
"""Ways to need less memory in one process, the cheapest first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that a process may have."""

    whose: str
    size: int
    """Bytes."""

    def fits(self, needs: Needs) -> bool | None:
        """Returns whether a process has room; None: its peak is not known, and its states alone have room."""
        if needs.peak is None:
            return None if needs.states.total + CONTEXT_BYTES <= self.size else False
        return self.needed(needs.peak) <= self.size

    @staticmethod
    def needed(peak: int) -> int:
        """Computes the bytes of a GPU that a process with this peak takes, with a margin."""
        return int(peak * MARGIN) + CONTEXT_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A plan, and what it needs."""

    plan: str
    processes: int
    batch: int
    """Samples per step over all processes."""
    needs: Needs | None
    """Of the process that needs most; None: the plan is not possible, or not foreseen."""
    why: str = ""
    """The reason why there are no needs."""
    fits: bool | None = None
    """Whether the site's GPUs have room for it; None: unknown, or no site was named."""


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
) -> list[Foreseen]:
    """Foresees what each plan needs in memory at each batch size; without plans, some that train the same on `gpus`.

    Nothing is trained: the model is traced on tensors without memory. On a CPU the kernels that need memory of their
    own are run once each, in a process of their own.

    Raises:
        TaskError: the task cannot be traced.
        UsageError: no plan can be foreseen, or the site is not known.
    """
    from grappe.data.prepare import prepare
    from grappe.foresight.kernels import Kernels
    from grappe.foresight.sketch import Sketch

    room = None if site is None else room_of(site)
    wanted = [as_plan(plan) for plan in plans] or list(candidates(gpus or (1, 2, 4, 8)))
    made = TaskReference.of(task, fields).resolve()
    folder = data_folder(data)
    prepare(made, folder)
    sketch = Sketch(made, folder, foreach=room is not None, kernels=None if room else Kernels())
    batches = batch_size or (made.batch_size,)
    found = [foreseen(sketch, plan, batch, room) for batch in batches for plan in wanted]
    if all(one.needs is None for one in found):
        raise UsageError("; ".join(dict.fromkeys(one.why for one in found)))
    return found


def candidates(counts: Sequence[int]) -> Iterator[Plan]:
    """Yields plans on each number of processes that train the same, those that cost least first."""
    for count in counts:
        spread = (
            [""] if count == 1 else [f"replicate={count}", *(f"shard={count},zero={z}" for z in (1, 2, 3))]
        )
        for measure in MEASURES:
            for text in spread:
                yield as_plan(",".join(filter(None, (text, measure))))


def foreseen(sketch: Sketch, plan: Plan, batch: int, room: Room | None) -> Foreseen:
    """Foresees one plan at a batch size of `batch` samples; with `room`, whether it fits a GPU.

    Raises:
        TaskError: the task cannot be traced.
    """
    from grappe import engines
    from grappe.foresight.compose import needs

    try:
        engines.check(plan)
        found = needs(sketch, plan, batch=batch, gpu=room is not None)
    except TaskError:
        raise  # every plan has it
    except GrappeError as error:
        return Foreseen(plan=str(plan), processes=plan.processes, batch=batch, needs=None, why=str(error))
    return Foreseen(
        plan=str(plan),
        processes=plan.processes,
        batch=batch,
        needs=found,
        fits=None if room is None else room.fits(found),
    )
