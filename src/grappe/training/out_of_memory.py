"""Out of memory: names what used the memory, and plans that would fit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
from collections.abc import Iterator
from typing import Any

from grappe import engines
from grappe.engines.shared.memory_needs import Needs
from grappe.errors import GrappeError, OutOfMemory
from grappe.plan import Plan
from grappe.step.given import optimizer_of
from grappe.task import Task

THREAD = "can't start new thread"
WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "bad_alloc",
    THREAD,
)
WORD = {"optimizer": "optimizer state"}
DEGREES = (2, 4, 8)
RESERVE_BYTES = 16_000_000  # kept for finding out what took the rest


@contextlib.contextmanager
def explained(task: Task, plan: Plan, rank: int) -> Iterator[None]:
    """Explains an out-of-memory error: what used the memory, and what to do."""
    from grappe.profiling import memory

    memory.heed_limit()
    before = memory.data_size()
    reserve = [bytearray(RESERVE_BYTES)]
    try:
        yield
    except Exception as error:
        reserve.clear()
        if not is_out_of_memory(error):
            raise
        held = memory.found_by_kind()  # while the traceback still keeps it alive
        raise OutOfMemory(_message(task, plan, rank, held, before)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` is an out-of-memory error, of a CPU or a GPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    known = isinstance(error, RuntimeError | OSError) and not isinstance(error, GrappeError)
    # Without a limit of the address space a thread's stack always has room: then it is threads that are limited.
    roomy = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    words = [one for one in WORDS if not (one == THREAD and roomy)]
    return known and any(one in str(error) for one in words)


def _message(task: Task, plan: Plan, rank: int, held: dict[str, int], before: int) -> str:
    from grappe.profiling import memory

    limit, whose = _limit()
    needs = needs_of(task)
    whole = {"parameters": needs.parameters, "gradients": needs.gradients, "optimizer": needs.optimizer}
    parts = [
        memory.size(held[kind]) + f" of {WORD.get(kind, kind)}" + _missing(held[kind], whole[kind], plan)
        for kind in whole
    ]
    now = memory.data_size()
    other = max(0, now - before - sum(held.values()))
    fitting = [
        f"{one} ({memory.size(need)} a process)" for one, need in fits(needs, plan, limit, before + other)
    ]
    advice = (
        f"Plans that would fit, by estimate: {'; '.join(fitting)}"
        if fitting
        else f"No plan of {DEGREES[-1]} times "
        "as many processes would fit, by estimate: take smaller microbatches, recompute, or a smaller model"
    )
    return (
        f"out of memory in process {rank}, which may take {memory.size(limit)} ({whose}). It held {', '.join(parts)}, "
        f"{memory.size(other)} of activations and others, and {memory.size(before)} from before the model. {advice}"
    )


def _missing(held: int, whole: int, plan: Plan) -> str:
    from grappe.profiling import memory

    share = whole / (plan.shard * plan.pipeline * plan.tensor)
    return f" (of {memory.size(share)})" if held < 0.9 * share else ""


def fits(needs: Needs, plan: Plan, limit: int, rest: int) -> list[tuple[str, float]]:
    """Finds the smallest plan of each kind that needs at most `limit` bytes per process; returns these needs too.

    At the end of the list: plans with offload to a disk, for which the user must name the folder.

    Args:
        rest: the bytes that every process needs besides parameters, gradients and optimizer state.
    """
    found: list[tuple[str, float]] = []
    for kind in ("shard", "pipeline"):
        for degree in DEGREES:
            changes: dict[str, Any] = {kind: getattr(plan, kind) * degree}
            if kind == "pipeline":
                changes["microbatches"] = max(plan.microbatches, 4 * changes["pipeline"])
            try:
                other = dataclasses.replace(plan, **changes)
                engines.check(other)
            except GrappeError:
                continue
            if kind == "pipeline" and len(needs.units) < other.pipeline:
                continue
            need = needs.of(other) + rest
            if need <= limit:
                found.append((str(other), need))
                break
    for name in engines.names():
        away = engines.find(name).offloaded_to_disk(plan, needs)
        if away is not None and away[1] + rest <= limit:
            found.append((away[0], away[1] + rest))
    return found


def needs_of(task: Task) -> Needs:
    """Computes the bytes of the task's model, gradients and optimizer state, on the meta device."""
    import torch

    from grappe.parallel.materialise import on_meta

    model = on_meta(task)
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    gradients = sum(_nbytes(one) for _, one in named)
    try:
        optimizer = optimizer_of(task, named)
        for _, one in named:
            one.grad = torch.empty_like(one)
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        state = sum(_nbytes(value) for value in states if isinstance(value, torch.Tensor))
    except Exception:  # an optimizer that wants values: most keep two numbers for each
        state = 2 * gradients
    units = tuple(sum(_nbytes(one) for one in unit.parameters()) for unit in task.units(model))
    return Needs(
        parameters=sum(_nbytes(one) for one in [*model.parameters(), *model.buffers()]),
        gradients=gradients,
        optimizer=state,
        units=units,
        largest=max((_nbytes(one) for one in model.parameters()), default=0),
    )


def _nbytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def _limit() -> tuple[int, str]:
    """Returns a process's memory limit, and the origin of the limit."""
    import torch

    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if soft != resource.RLIM_INFINITY:
        return soft, "RLIMIT_DATA, see `ulimit -d`"
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, "this GPU's memory"
    return _machine(), "this machine's memory"


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
