"""Slices: how a global batch is cut, where a forward or a loss depends on the samples of other processes."""

from __future__ import annotations

import dataclasses

from grappe.data.order import cut
from grappe.plan import Plan
from grappe.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of a global batch, as far as the forward and the loss of a process's microbatch depend on them."""

    ways: int = 1
    """Processes that have slices of the global batch, and are asked for theirs."""
    micros: tuple[int, ...] = ()
    """Samples of each microbatch of the first slice, where the loss needs all of them; else empty."""
    samples: int = 0
    """Samples of the global batch; 0: they do not matter."""
    synchronised: bool = False
    """Whether batch normalisation has the statistics of all slices."""


ALONE = Slices()
"""A microbatch depends on itself alone."""


def slices_of(task: Task, plan: Plan, samples: int, dataset: int) -> Slices:
    """Returns what the microbatches of a step of `samples` samples depend on, of a data set of `dataset`."""
    synchronised = plan.batchnorm == "sync" and plan.data_parallel > 1
    if not task.whole_batch_loss:
        return Slices(ways=plan.data_parallel, synchronised=True) if synchronised else ALONE
    samples = min(samples, dataset)
    first, last = cut(samples, plan.data_parallel, 0)
    bounds = (cut(last - first, plan.microbatches, number) for number in range(plan.microbatches))
    return Slices(
        ways=plan.data_parallel,
        micros=tuple(end - begin for begin, end in bounds if end > begin),
        samples=samples,
        synchronised=synchronised,
    )
