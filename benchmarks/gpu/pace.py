"""Seconds of a training's steps: the device is waited for before and after them, and at no step between."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import grappe
from benchmarks.gpu.part import Part
from benchmarks.gpu.training import plan_on
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.step.loss import StepResult
from grappe.training.loop import Training
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker


class Window:
    """Reads the clock behind step `warmup` and `steps` further on, each time once the device is done."""

    def __init__(self, part: Part, warmup: int, steps: int) -> None:
        self._part, self._steps = part, steps
        self._bounds = (warmup, warmup + steps)
        self._done, self._times = 0, list[float]()

    def tick(self) -> None:
        """Counts a step."""
        self._done += 1
        if self._done in self._bounds:
            self._part.wait()
            self._times.append(time.perf_counter())

    @property
    def last(self) -> int:
        """Returns the number of steps to take: one more than are timed, so that no ending is."""
        return self._bounds[1] + 1

    @property
    def seconds(self) -> float:
        """Computes the seconds a step."""
        began, ended = self._times
        return (ended - began) / self._steps


def train_here(
    part: Part, task: grappe.Task, plan: str, name: str, options: Options, tick: Callable[[], object]
) -> Path:
    """Trains on one process, which is this one, and calls `tick` behind each step; returns the run's folder."""
    request = Request(
        task=TaskReference.of(task),
        plan=Plan.parse(plan_on(part, plan)),
        run=part.scratch / name,
        data=part.scratch,
        options=options,
        quiet=True,
    )
    # As if a launcher had started it: what this process prints stays where it goes.
    process = ProcessRank(rank=0, size=1, local_rank=0, local_size=1, launcher="torchrun")
    with _behind_each_step(tick):
        worker(request, process, part.scratch)
    give_memory_back()
    return part.scratch / name


def seconds_a_step(part: Part, task: grappe.Task, plan: str, name: str, warmup: int, steps: int) -> float:
    """Returns the seconds a step of a bare training of grappe's."""
    window = Window(part, warmup, steps)
    train_here(part, task, plan, name, Options(steps_only=True, steps=window.last), window.tick)
    return window.seconds


def give_memory_back() -> None:
    """Frees what an earlier contender held, so that the next one has all of the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _behind_each_step(tick: Callable[[], object]) -> Iterator[None]:
    after = Training.after

    def ticked(self: Training, result: StepResult) -> bool:
        stop = after(self, result)
        tick()
        return stop

    Training.after = ticked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Training.after = after  # type: ignore[method-assign]
