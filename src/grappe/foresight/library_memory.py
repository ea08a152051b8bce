"""Library memory: measures what libraries (oneDNN, MKL) keep of a plan's kernels when all their tensors are freed.

They keep primitives, scratchpads and the stacks of their threads, for the next call. How much that is depends on the
shapes, the type of numbers and the processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from grappe.errors import ProcessDied
from grappe.foresight import pipeline_peaks, step_peaks
from grappe.foresight.kernels import Call
from grappe.foresight.partition import threads_of
from grappe.foresight.sketch import Sketch
from grappe.foresight.trace import Trace
from grappe.launch.fork import run_in_fork
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.profiling.memory import data_size, return_freed_memory

Calls = tuple[tuple[Call, ...], tuple[Call, ...]]
"""The distinct calls of an evaluation and of a step, of one process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryMemory:
    """Bytes that libraries keep in one process."""

    evaluation: int = 0
    """From the first evaluation on."""
    step: int = 0
    """From the first step on, besides."""

    @property
    def total(self) -> int:
        """Sums both."""
        return self.evaluation + self.step


NOTHING_KEPT = LibraryMemory()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptRequest:
    """The calls of each process that differs, on their way to the process that runs them."""

    calls: tuple[Calls, ...]
    threads: int


def library_memory(sketch: Sketch, plan: Plan, samples: int) -> LibraryMemory | None:
    """Measures what libraries keep in the process of a plan in which they keep most, at `samples` samples a step.

    Each distinct kernel is run once, in a process of its own, where freed memory goes back at once. None: that process
    got no memory, or the sketch has no kernels.
    """
    if not sketch.runs_kernels:
        return None
    traces = (pipeline_peaks if plan.pipeline > 1 else step_peaks).traces(sketch, plan, samples)
    calls = tuple((_distinct(evaluated), _distinct([step])) for evaluated, step in traces)
    try:
        found = _measured(tuple(dict.fromkeys(calls)), threads_of(plan))
    except ProcessDied:
        return None
    return max(found, key=lambda one: one.total)


def _distinct(traces: Sequence[Trace]) -> tuple[Call, ...]:
    calls = dict.fromkeys(call for trace in traces for _, _, call in trace.calls)
    return tuple(call for call in calls if not call.too_large)


@functools.lru_cache(maxsize=64)
def _measured(calls: tuple[Calls, ...], threads: int) -> list[LibraryMemory]:
    request = KeptRequest(calls=calls, threads=threads)
    return local("grappe.foresight.library_memory:worker", request, 1, from_training=True)


def worker(request: KeptRequest, process: ProcessRank, rendezvous_folder: Path) -> list[LibraryMemory]:
    """Runs the calls of each process in a fork of this one, whose libraries keep nothing yet."""
    found = []
    for evaluation, step in request.calls:
        told = run_in_fork(functools.partial(_kept, evaluation, step, request.threads))
        after_evaluation, after_step = map(int, told.split())
        found.append(LibraryMemory(evaluation=after_evaluation, step=after_step))
    return found


def _kept(evaluation: Iterable[Call], step: Iterable[Call], threads: int) -> str:
    """Runs the calls; returns the bytes that stay after the evaluation's, and those that the step's add."""
    return_freed_memory()
    torch.set_num_threads(threads)
    began = data_size()
    torch.ones(
        threads << 16
    ).exp_()  # starts all threads: an evaluation has operators that no library computes
    _run(evaluation)
    between = data_size()
    _run(step)
    return f"{max(0, between - began)} {max(0, data_size() - between)}"


@torch.no_grad()
def _run(calls: Iterable[Call]) -> None:
    for call in calls:
        with contextlib.suppress(
            RuntimeError
        ):  # in bf16 fake tensors may have a type that kernels do not take
            call.on_ones()()
