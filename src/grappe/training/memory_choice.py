"""Memory choice: finds what a training under memory= recomputes, before it begins, the same on all its processes."""

from __future__ import annotations

import dataclasses
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grappe.errors import PlanError
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.profiling.memory import data_limit, data_size, free
from grappe.training.out_of_memory import MemoryReport, memory_budgets
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference
from grappe.words import format_bytes

if TYPE_CHECKING:
    import torch

COPIED = 64 << 20
"""Bytes by which the rate of copies is measured."""
CHOSEN_KEYS = ("memory", "recompute", "microbatches", "offload")
"""Keys of a plan that the choice sets."""


class ChosenPlan(NamedTuple):
    """The plan that memory= stands for."""

    plan: Plan
    chosen: str
    """A sentence on it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """The input of the process that chooses."""

    task: TaskReference
    plan: Plan
    data: Path
    before: int = 0
    """Bytes of a process before its model."""
    gpu: str = ""
    """The GPU that the plan trains on; "": none."""
    gpu_bytes: int = 0
    """Bytes of its memory."""
    host: int = 0
    """Bytes of the host's memory that a process may have for what its GPU has no room for."""
    rate: float = 0.0
    """Bytes a second of copies between the two."""
    earlier: ChosenPlan | None = None
    """Choice of the run that is resumed, which it keeps where that fits."""


def with_memory_chosen(request: Request, world: World) -> Request:
    """Returns the request with the plan that memory= stands for, and a sentence on it. Collective.

    Raises:
        PlanError: nothing fits; raised on every process.
    """
    if request.plan.memory == "none":
        return request

    def choose() -> ChosenPlan:
        asked = ChoiceRequest(task=request.task, plan=request.plan, data=request.data, before=data_size())
        if world.device.type == "cuda":
            import torch

            gpu = torch.cuda.get_device_properties(world.device)
            host = (free() or 0) // world.process.local_size
            asked = dataclasses.replace(
                asked, gpu=gpu.name, gpu_bytes=gpu.total_memory, host=host, rate=rate_of_copies(world.device)
            )
        try:
            return _chosen(dataclasses.replace(asked, earlier=_earlier(request)))
        except KeyboardInterrupt:  # a signal, which is noted: the training ends before its first step
            return ChosenPlan(dataclasses.replace(request.plan, memory="none"), "")

    choice = world.first(choose)
    return dataclasses.replace(request, plan=choice.plan, chosen=choice.chosen)


def _earlier(request: Request) -> ChosenPlan | None:
    """Returns what the run chose at its last start, for the same plan; None: nothing."""
    if request.run is None or not Run.is_run(request.run):
        return None
    description, asked = Run(request.run).read_description(), request.plan
    earlier, chosen = Plan.parse(str(description.get("plan", ""))), str(description.get("chosen", ""))
    same = dataclasses.replace(asked, **{key: getattr(earlier, key) for key in CHOSEN_KEYS}) == earlier
    return ChosenPlan(earlier, chosen) if same and chosen.startswith(f"memory={asked.memory}:") else None


def _chosen(request: ChoiceRequest) -> ChosenPlan:
    """Chooses in a process of its own, whose memory goes back."""
    return local("grappe.training.memory_choice:worker", request, 1, from_training=True)


def worker(request: ChoiceRequest, process: ProcessRank, rendezvous_folder: Path) -> ChosenPlan:
    """Traces the task, and chooses."""
    from grappe.foresight.devices import device_reported
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.forecast import LibraryMemory, library_memory
    from grappe.foresight.kernels import Kernels
    from grappe.foresight.recomputation import fitted
    from grappe.foresight.search import GPU_WORKSPACE_BYTES, MemoryBudget

    plan, gpu, task = request.plan, bool(request.gpu), request.task.resolve()
    base = dataclasses.replace(plan, memory="none")
    fake_model = FakeModel(task, request.data, foreach=gpu, kernels=None if gpu else Kernels(), records=True)
    limit, budget, reserve = plan.memory_limit, None, ""
    if limit is None:
        if gpu:
            budget = MemoryBudget(whose="this GPU's memory", size=request.gpu_bytes // plan.per_device)
        else:
            report = MemoryReport(rank=0, held={}, other=0, before=request.before)
            budget, _ = memory_budgets(report, base)
            kept = None if data_limit() is None else library_memory(fake_model, base, task.batch_size)
            if kept is not None:
                assumed = budget.libraries
                libraries = LibraryMemory(
                    evaluation=max(kept.evaluation, assumed.evaluation), step=max(kept.step, assumed.step)
                )
                budget = dataclasses.replace(budget, libraries=libraries)
        limit, reserve = budget.room(plan.processes), f" (of {format_bytes(budget.size)}, {budget.whose})"
    limit -= GPU_WORKSPACE_BYTES if gpu else 0
    choice = fitted(
        fake_model,
        plan,
        task.batch_size,
        limit,
        device_reported(request.gpu),
        gpu=gpu,
        fits=None if budget is None else lambda needs: budget.fits(needs, plan.processes),
        host=request.host,
        rate=request.rate,
        earlier=None if request.earlier is None else request.earlier.plan,
    )
    if request.earlier is not None and choice.plan == request.earlier.plan:
        return request.earlier
    return ChosenPlan(plan=choice.plan, chosen=choice.in_words(plan, limit, reserve))


def rate_of_copies(device: torch.device) -> float:
    """Measures the bytes a second of copies between page-locked memory and a GPU, to the host and back in turn."""
    import torch

    away = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)

    def copy() -> None:
        away.copy_(there, non_blocking=True)
        there.copy_(away, non_blocking=True)
        torch.cuda.synchronize(device)

    return 2 * COPIED / min(timeit.repeat(copy, number=1, repeat=5))


def memory_chosen(task: TaskReference, plan: Plan, data: Path) -> tuple[Plan, str]:
    """Returns the plan that memory= stands for on this machine, for a command without a training, and a sentence.

    Raises:
        PlanError: nothing fits; or it asks for a GPU's memory, which only a training's process knows.
    """
    if plan.memory == "none":
        return plan, ""
    if plan.memory == "auto":
        raise PlanError("memory=auto is of a training's own device: write the bytes here, as in memory=14GB")
    return _chosen(ChoiceRequest(task=task, plan=plan, data=data))
