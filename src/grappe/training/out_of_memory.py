"""Out of memory: names what used the memory, and a plan that is foreseen to fit."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, OutOfMemory
from grappe.errors.causes import is_out_of_memory
from grappe.launch.local import start_server
from grappe.plan import Plan
from grappe.profiling import memory
from grappe.task import Task
from grappe.words import format_bytes, format_part_of_bytes

if TYPE_CHECKING:
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.forecast import LibraryMemory
    from grappe.foresight.search import MemoryBudget

KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
CONNECTION_BYTES = 80_000_000  # of RLIMIT_DATA: threads and buffers of connections to other processes
RESERVE_BYTES = 16_000_000  # kept for finding out what took the rest
STACKS_BYTES = 17_000_000  # of the threads that start later: the watchdog's, and one that writes
OBJECTS_BYTES = 12_000_000  # of a first step's modules and messages: 1 to 12 MB beyond all that is foreseen
LIBRARIES_BYTES = 25_000_000
"""Memory that libraries keep from their first forward on, where it is not measured."""
STEP_BYTES = 30_000_000
"""The least that they keep from their first step on, with its objects, where it is not measured."""
MARGIN = 1.03
"""Factor of a CPU's peak for the space between blocks, where freed memory is returned at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """A process's use of memory when it got no more."""

    rank: int
    held: Mapping[str, int]
    """Bytes by kind: parameters, gradients, optimizer."""
    other: int
    """Bytes of activations and others."""
    before: int
    """Bytes from before the model."""
    libraries: int | None = None
    """Bytes that libraries keep from their first forward on: buffers, compiled kernels; None: not measured."""

    @property
    def beyond(self) -> int:
        """Computes the bytes of a process beyond what torch allocates and what libraries keep."""
        return self.before + RESERVE_BYTES + STACKS_BYTES + OBJECTS_BYTES

    @property
    def assumed(self) -> LibraryMemory:
        """Assumes the bytes that libraries keep in an evaluation and in a step, where no kernels are run."""
        from grappe.foresight.forecast import LibraryMemory

        kept = LIBRARIES_BYTES if self.libraries is None else self.libraries
        return LibraryMemory(evaluation=kept, step=max(kept, STEP_BYTES) - OBJECTS_BYTES)


class LibraryMemoryProbe:
    """Measures the memory that libraries (oneDNN, MKL) keep after the first evaluation."""

    libraries: int | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context of the first evaluation; measures under RLIMIT_DATA only, where freed memory goes back at once."""
        began = memory.data_size()
        yield
        if memory.data_limit() is not None:
            self.libraries = max(0, memory.data_size() - began)


class LocalOutOfMemory(OutOfMemory):
    """Raised inside the process that ran out of memory; `with_plan_that_fits` makes it the user's message."""

    def __init__(self, report: MemoryReport) -> None:
        super().__init__(_shortage_message(report, {}))
        self.report = report


@contextlib.contextmanager
def reporting_out_of_memory(rank: int) -> Iterator[LibraryMemoryProbe]:
    """Explains an out-of-memory error: what used the memory.

    Yields:
        What measures the first evaluation.

    Raises:
        LocalOutOfMemory: there was one.
    """
    memory.return_freed_memory()
    before = memory.data_size()
    reserve, probe = [bytearray(RESERVE_BYTES)], LibraryMemoryProbe()
    try:
        yield probe
    except Exception as error:
        reserve.clear()
        # An error that names a task's method has that method's own exception as its cause.
        if not is_out_of_memory(error) and not (error.__cause__ and is_out_of_memory(error.__cause__)):
            raise
        held = memory.bytes_by_kind()  # while the traceback still keeps it alive
        other = max(0, memory.data_size() - before - sum(held.values()))
        libraries = probe.libraries
        raise LocalOutOfMemory(
            MemoryReport(rank=rank, held=held, other=other, before=before, libraries=libraries)
        ) from None


def with_plan_that_fits(error: LocalOutOfMemory, task: Task, plan: Plan, data: Path) -> OutOfMemory:
    """Frees the failed training's memory, then extends the error with a plan that is foreseen to fit."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    error.__context__ = None
    gc.collect()
    try:
        states, advice = _foreseen(error.report, task, plan, data)
    except Exception as problem:  # memory is short, and the first error is the one to report
        why = f" ({problem})" if isinstance(problem, GrappeError) else ""
        states = {}
        advice = f"Which plan fits is not foreseen{why}: take smaller microbatches, recompute, or shard="
    return OutOfMemory(f"{_shortage_message(error.report, states)}. {advice}")


def _foreseen(report: MemoryReport, task: Task, plan: Plan, data: Path) -> tuple[Mapping[str, int], str]:
    """Foresees the states of a process of this plan, and plans that fit; returns both, the second as a sentence."""
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.kernels import Kernels
    from grappe.foresight.search import fitting, foreseen

    plan = dataclasses.replace(plan, memory="none")
    budget, more = memory_budgets(report, plan)
    kernels = None
    # Under RLIMIT_DATA a further process has a limit of its own, and takes none of this one's memory.
    if not (budget.gpu or budget.shared):
        start_server(metrics=False)
        kernels = Kernels(scratch=False)  # below 1 MB in all plans that were measured
    fake_model = FakeModel(task, data, foreach=budget.gpu, kernels=kernels, records=True)
    this = foreseen(fake_model, plan, task.batch_size, None).needs
    states = {} if this is None else {kind: getattr(this.states, kind) for kind in KINDS}
    foreseen_plan = fitting(fake_model, plan, budget, more)
    plans = []
    if foreseen_plan is not None and foreseen_plan.needs is not None:
        chosen = budget if foreseen_plan.processes == plan.processes else more
        plans.append(f"{foreseen_plan.plan} ({format_bytes(chosen.taken(foreseen_plan.needs))} a process)")
    plans += [f"{name} ({format_bytes(need)} a process)" for name, need in _on_disk(fake_model, plan, budget)]
    if plans:
        return states, f"Foreseen to fit: {'; '.join(plans)}"
    return states, (
        "No plan that can be foreseen fits, on up to 8 times as many processes: take a smaller batch_size, or a "
        "smaller model"
    )


def _on_disk(fake_model: FakeModel, plan: Plan, budget: MemoryBudget) -> Iterator[tuple[str, float]]:
    """Yields plans with offload to a disk that fit, for which the user must name the folder, and a process's bytes."""
    from grappe import engines
    from grappe.engines.base import ModelMemory
    from grappe.foresight.search import foreseen

    # At stage 3, as such plans are: other stages keep whole parameters or gradients, which no disk plan has.
    native = dataclasses.replace(plan, engine="native", offload="none", zero=3)
    needs = foreseen(fake_model, native, fake_model.task.batch_size, None).needs
    if needs is None or needs.peak is None:
        return
    units: dict[int, int] = {}
    for parameter in fake_model.parameters:
        units[parameter.unit] = units.get(parameter.unit, 0) + parameter.size
    model = ModelMemory(
        parameters=sum(units.values()) + fake_model.buffers,
        gradients=sum(parameter.size for parameter in fake_model.parameters if parameter.trained),
        units=tuple(size for unit, size in units.items() if unit >= 0),
        largest=max((parameter.size for parameter in fake_model.parameters), default=0),
    )
    activations = max(0, needs.peak - needs.states.total)
    for name in engines.names():
        away = engines.find(name).offloaded_to_disk(plan, model)
        if away is not None and away[1] + activations + budget.fixed <= budget.size:
            yield away[0], away[1] + activations + budget.fixed


def memory_budgets(report: MemoryReport, plan: Plan) -> tuple[MemoryBudget, MemoryBudget]:
    """Returns a process's memory budget, and the budget with more processes on the same machine."""
    from grappe.foresight.search import MemoryBudget

    limit, whose, gpu = _limit()
    if gpu:
        budget = MemoryBudget(whose=whose, size=limit // plan.per_device)
        return budget, budget
    shared = memory.data_limit() is None
    budget = MemoryBudget(
        whose=whose, size=limit, beyond=report.beyond, libraries=report.assumed, shared=shared, gpu=False
    )
    if not shared:  # only there freed memory goes back at once
        budget = dataclasses.replace(budget, margin=MARGIN)
    alone = CONNECTION_BYTES if plan.processes == 1 else 0
    return budget, dataclasses.replace(budget, beyond=report.beyond + alone)


def _shortage_message(report: MemoryReport, states: Mapping[str, int]) -> str:
    limit, whose, _ = _limit()
    parts = []
    for kind, word in KINDS.items():
        held, total = report.held[kind], states.get(kind, 0)
        if held < 0.9 * total:
            some, all_of_it = format_part_of_bytes(held, total)
            parts.append(f"{some} of {word} (of {all_of_it})")
        else:
            parts.append(f"{format_bytes(held)} of {word}")
    parts.append(f"{format_bytes(max(0, report.other - (report.libraries or 0)))} of activations and others")
    if report.libraries is not None:
        parts.append(f"{format_bytes(report.libraries)} kept by libraries")
    return (
        f"out of memory in process {report.rank}, which may take {format_bytes(limit)} ({whose}). It held "
        f"{', '.join(parts)}, and {format_bytes(report.before)} from before the model"
    )


def _limit() -> tuple[int, str, bool]:
    """Returns a process's memory limit, the origin of the limit, and whether it is a GPU's."""
    import torch

    own = memory.data_limit()
    if own is not None:
        return own, "RLIMIT_DATA, see `ulimit -d`", False
    if torch.cuda.is_initialized():  # not where a plan trains on the CPU of a machine with GPUs
        return (torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, "this GPU's memory", True)
    group = memory.control_group()
    if group is not None and group.size < _machine():
        return group.size, "the memory of this job, or container", False
    return _machine(), "this machine's memory", False


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
