"""grappe train: trains a task under a plan, or goes on with a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from grappe.errors import UsageError
from grappe.options import Options
from grappe.plan import Plan, as_plan
from grappe.run import Run
from grappe.task import Task
from grappe.verbs.session import TaskReference, start
from grappe.watchers.base import Watcher
from grappe.watchers.logger import check as check_logger

DATA_FOLDER = "GRAPPE_DATA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the processes of a training are told."""

    task: TaskReference
    plan: Plan
    run: Path | None
    base: Path
    data: Path
    weights: Path | None
    options: Options
    quiet: bool = False
    """Whether to tell the user nothing but errors."""
    also: tuple[Watcher, ...] = ()
    """Further watchers, on every process; they travel by value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a training ended."""

    run: Path
    status: str
    step: int


def train(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    *,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
) -> Run:
    """Trains `task` under `plan`, or goes on with the run in `folder`.

    Args:
        task: a task, its class, or its name as on the command line.
        plan: a Plan or its text, "replicate=2"; "" is one process.
        folder: the run's folder; None makes a new one under `base`.
        data: where datasets are; None: the environment's GRAPPE_DATA, or ./data.
        fields: texts for the task's fields, when it is given by name.
        weights: a run or a safetensors file to start from.

    Raises:
        GrappeError: something is wrong with what was asked; the message says what to do.
    """
    return Run(run_training(request(task, plan, folder, data, fields, weights, options, base)).run)


def request(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
) -> Request:
    """A Request with every default filled in."""
    return Request(
        task=TaskReference.of(task, fields),
        plan=as_plan(plan),
        run=Path(folder) if folder else None,
        base=Path(base),
        data=data_folder(data),
        weights=Path(weights) if weights else None,
        options=options or Options(),
    )


def data_folder(data: Path | str | None) -> Path:
    """Where datasets are: `data`, the environment's GRAPPE_DATA, or ./data."""
    return Path(data or os.environ.get(DATA_FOLDER, "data"))


def run_training(asked: Request) -> Result:
    """Trains on the plan's processes, started here or by torchrun or srun."""
    for rank in asked.options.profile:
        if rank >= asked.plan.processes:
            raise UsageError(f"--profile={rank}: there are process 0 to {asked.plan.processes - 1}")
    for name in asked.options.log:
        check_logger(name)
    if asked.run is not None and Run.is_run(asked.run) and Run(asked.run).finished:
        finished = Run(asked.run)
        if not asked.options.steps:
            return Result(
                run=finished.folder, status="finished before", step=finished.description.get("step", 0)
            )
    return start("grappe.verbs.worker:worker", asked, asked.plan, saves=True)
