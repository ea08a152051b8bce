"""The largest batch that fits: doubled in new processes until memory is exhausted, then found by bisection."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from grappe.data.datasets import prepare
from grappe.errors import GrappeError
from grappe.launch.files import scratch
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.profiling import memory
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker as train_worker
from grappe.words import plan_name

STEPS = 3  # the optimizer's state comes with the first, the second has it and the gradients
EIGHTHS = 8  # how close the answer is: no more than an eighth below what just fits
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|MemoryError|bad_alloc|killed by SIGKILL|Cannot allocate",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestRequest:
    """The input of the processes that take a few steps at one batch size."""

    training: Request
    limit: int | None
    """Bytes of data that a process may have; None: no limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The result of a search for a plan's largest batch."""

    plan: str
    batch: int
    """Samples per step over all processes; 0: even the smallest batch does not fit."""
    too_large: int | None
    """The smallest batch size that did not fit; None: the whole dataset fits."""

    def __str__(self) -> str:
        name = plan_name(self.plan)
        if not self.batch:
            return f"largest batch of {name}: not even {self.too_large} fits"
        end = "all of the dataset" if self.too_large is None else f"{self.too_large} does not fit"
        return f"largest batch of {name}: {self.batch} ({end})"


def largest_batch(
    request: Request,
    plan: Plan,
    folder: Path,
    *,
    limit: int | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Largest:
    """Tries batch sizes under `plan`.

    Args:
        limit: bytes of data that each process may have; None: on a CPU its share of the free memory, so that
            the system does not kill processes; on a GPU, its memory.

    Raises:
        GrappeError: the training fails for another reason than memory.
    """
    task = request.task.resolve()
    prepare(task, request.data)
    samples = len(task.data("train", request.data))  # type: ignore[arg-type]
    limit = limit or _share(plan)

    def runs(batch: int) -> bool:
        """Returns whether a few steps of `batch` samples succeed."""
        training = dataclasses.replace(
            request,
            task=request.task.with_batch(batch),
            plan=plan,
            run=folder / f"largest-{batch}",
            base=folder,
            options=Options(steps=STEPS, steps_only=True),
            quiet=True,
        )
        trial = LargestRequest(training=training, limit=limit)
        try:
            start("grappe.verbs.measure.largest:worker", trial, plan, run=training.run)
        except GrappeError as error:
            if not OUT_OF_MEMORY.search(str(error)):
                raise
            note(f"batch {batch} does not fit")
            return False
        note(f"batch {batch} fits")
        return True

    fits, fails, batch = 0, None, min(samples, max(plan.data_parallel, task.batch_size))
    while fails is None and fits < samples:
        if runs(batch):
            fits, batch = batch, min(samples, 2 * batch)
        else:
            fails = batch
    least = 2 * plan.data_parallel
    while fails is not None and fails - fits > max(least, fails // EIGHTHS):
        batch = (fits + fails) // 2 // least * least or least
        if batch in (fits, fails):
            break
        fits, fails = (batch, fails) if runs(batch) else (fits, batch)
    return Largest(plan=str(plan), batch=fits, too_large=fails)


def largest_batches(
    task: Task | type[Task] | str,
    plans: Sequence[AnyPlan],
    data: Path | str | None = None,
    fields: Mapping[str, object] | None = None,
) -> Iterator[Largest]:
    """Finds the largest batch of each plan; raises like `largest_batch`."""
    with scratch("largest") as folder:
        for number, plan in enumerate(plans):
            request = Request(task=TaskReference.of(task, fields), plan=Plan(), data=data_folder(data))
            yield largest_batch(request, as_plan(plan), folder / str(number))


def worker(request: LargestRequest, process: ProcessRank, rendezvous_folder: Path) -> None:
    """Runs one process of a training of a few steps. Collective."""
    if request.limit is not None:
        import resource

        # The limit counts data, so that a failure is torch's own message; one on addresses would count libraries.
        own = resource.getrlimit(resource.RLIMIT_DATA)[1]  # the user's `ulimit -d`, which may not be raised
        limit = request.limit if own == resource.RLIM_INFINITY else min(request.limit, own)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train_worker(request.training, process, rendezvous_folder)


def _share(plan: Plan, meminfo: Path = memory.MEMINFO) -> int | None:
    """Returns each process's share of the host's free memory; None if the plan trains on a GPU."""
    import torch

    if plan.device == "cuda" or (plan.device == "auto" and torch.cuda.is_available()):
        return None
    free = memory.free(meminfo)
    return None if free is None else free // plan.processes
