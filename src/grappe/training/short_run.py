"""Short runs: starts processes for a few steps of a task, by an engine or as a training, and returns their result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference

if TYPE_CHECKING:
    from grappe.checkpoint.weights import Weights
    from grappe.data.loader import BatchLoader
    from grappe.engines.base import Engine
    from grappe.launch.world import World
    from grappe.task import Task

CALLED = "grappe.training.short_run:called"
"""Function for `start` that calls its argument."""
StartProcesses = Callable[[str, Any, Plan], Any]
"""Runs a function ("package.module:name") with an argument on a plan's processes; what process 0 returned."""


def called(work: Callable[[ProcessRank, Path], Any], process: ProcessRank, rendezvous_folder: Path) -> Any:
    """Runs one process of `work`: a function of a module, or a functools.partial of one."""
    return work(process, rendezvous_folder)


class TaskProcess(NamedTuple):
    """A process of a short run, which has joined the others."""

    task: Task
    """The task, whose data are prepared."""
    plan: Plan
    data: Path
    world: World

    def engine(
        self, task: Task, batches: BatchLoader, total_steps: int, *, weights: Weights | None = None, samples: int = 0
    ) -> AbstractContextManager[Engine]:
        """Makes a context with the plan's engine for `task`, which may be derived from this process's.

        Args:
            total_steps: number of steps, for the schedule.
            weights: None: those of a new model.
            samples: number of training samples; 0 where batches may be uneven in a pipeline.
        """
        from grappe import engines
        from grappe.checkpoint.initial import built
        from grappe.engines.base import EngineSetup

        setup = EngineSetup(
            task=task,
            plan=self.plan,
            world=self.world,
            weights=weights or built(task),
            total_steps=total_steps,
            sample_inputs=batches.example(),
            samples=samples,
        )
        return engines.running(setup)


def short_run(
    work: Callable[[TaskProcess], Any], task: TaskReference, plan: Plan, data: Path, *, run: StartProcesses = start
) -> Any:
    """Calls `work` in each of the plan's processes; returns the result of process 0.

    Args:
        work: a function of a module, or a functools.partial of one.
        run: starts the processes.
    """
    return run(CALLED, functools.partial(with_task, work, task, plan, data), plan)


def with_task(
    work: Callable[[TaskProcess], Any],
    reference: TaskReference,
    plan: Plan,
    data: Path,
    process: ProcessRank,
    rendezvous_folder: Path,
) -> Any:
    """Runs one process of a short run. Collective."""
    from grappe.data.datasets import prepare
    from grappe.errors.user_code import naming_user_line
    from grappe.launch.world import joined

    with joined(plan, process, rendezvous_folder) as world:
        task = reference.resolve()
        with naming_user_line(task):
            prepare(task, data, world)
            return work(TaskProcess(task, plan, data, world))


def short_training(
    request: Request,
    run: Path,
    then: Callable[[Run, Request, ProcessRank], Any] = lambda run, request, process: None,
    *,
    limit: int | None = None,
) -> Any:
    """Trains in the new run `run`, without a line on the terminal; returns the result of `then` on process 0.

    Args:
        then: called at the end.
        limit: bytes of data that each process may have; None: no limit.
    """
    request = dataclasses.replace(request, run=run, base=run.parent, quiet=True)
    return start(CALLED, functools.partial(train, request, then, limit), request.plan, run=run)


def train(
    request: Request,
    then: Callable[[Run, Request, ProcessRank], Any],
    limit: int | None,
    process: ProcessRank,
    rendezvous_folder: Path,
) -> Any:
    """Runs one process of a short training. Collective."""
    from grappe.training.worker import worker as train_worker

    if limit is not None:
        import resource

        # The limit counts data, so that a failure is torch's own message; one on addresses would count libraries.
        own = resource.getrlimit(resource.RLIMIT_DATA)[1]  # the user's `ulimit -d`, which may not be raised
        limit = limit if own == resource.RLIM_INFINITY else min(limit, own)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    result = train_worker(request, process, rendezvous_folder)
    return None if process.rank else then(Run(result.run), request, process)
