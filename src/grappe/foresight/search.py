"""Search: foresees plans that train the same, those that cost least first, and finds the first whose memory fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from grappe import engines
from grappe.errors import GrappeError, TaskError
from grappe.foresight.compose import Needs, needs
from grappe.foresight.sketch import Sketch
from grappe.plan import Plan, as_plan

CONTEXT_BYTES = 1_500_000_000  # of a GPU: CUDA's context and libraries, and NCCL's buffers
MARGIN = 1.1  # of a peak: what an allocator cannot use between blocks, and kernels' workspace
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
    besides: int = CONTEXT_BYTES
    """Bytes of it that a process takes beside what torch allocates."""
    shared: bool = False
    """Whether all processes of a plan have it together."""
    gpu: bool = True
    """Whether it is a GPU's."""

    def fits(self, needs: Needs, processes: int = 1) -> bool | None:
        """Returns whether a process has room; None: its peak is not known, and its states alone have room."""
        sharing = processes if self.shared else 1
        if needs.most is None:
            return None if (needs.states.total + self.besides) * sharing <= self.size else False
        return self.needed(needs.most) * sharing <= self.size

    def needed(self, peak: int) -> int:
        """Computes the bytes that a process with this peak takes, with a margin."""
        return int(peak * MARGIN) + self.besides

    def taken(self, needs: Needs) -> int:
        """Computes the bytes that a process takes, at least."""
        return self.needed(needs.states.total if needs.most is None else needs.most)


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
    """Whether there is room for it; None: unknown, or no room was given."""


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
    """Foresees one plan at a batch size of `batch` samples; with `room`, whether there is room for it.

    Raises:
        TaskError: the task cannot be traced.
    """
    try:
        engines.check(plan)
        found = needs(sketch, plan, batch=batch, gpu=room is not None and room.gpu)
    except TaskError:
        raise  # every plan has it
    except GrappeError as error:
        return Foreseen(plan=str(plan), processes=plan.processes, batch=batch, needs=None, why=str(error))
    return Foreseen(
        plan=str(plan),
        processes=plan.processes,
        batch=batch,
        needs=found,
        fits=None if room is None else room.fits(found, plan.processes),
    )


def others(plan: Plan, times: Sequence[int] = (1,)) -> Iterator[Plan]:
    """Yields plans that learn the same, those that cost least first, on so many times as many processes."""
    for other in candidates([plan.replicate * plan.shard * more for more in times]):
        yield dataclasses.replace(
            plan,
            replicate=other.replicate,
            shard=other.shard,
            zero=other.zero,
            microbatches=max(plan.microbatches, other.microbatches),
            recompute=plan.recompute or other.recompute,
        )


def first_that_fits(sketch: Sketch, plans: Iterator[Plan], room: Room) -> Foreseen | None:
    """Finds the first of `plans` that has room at the task's batch size; None: none has for sure.

    Raises:
        TaskError: the task cannot be traced.
    """
    for plan in plans:
        found = foreseen(sketch, plan, sketch.task.batch_size, room)
        if found.fits:
            return found
    return None
