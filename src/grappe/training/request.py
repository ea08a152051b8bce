"""Request: the input of a training's processes; Result: a training's end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from grappe.errors import UsageError
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import Watcher
from grappe.training.watchers.find import check_name

DATA_FOLDER = "GRAPPE_DATA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a training's processes: task, plan, folders and options."""

    task: TaskReference
    plan: Plan
    run: Path | None
    base: Path
    data: Path
    weights: Path | None
    options: Options
    quiet: bool = False
    """Whether to print nothing but errors."""
    watchers: tuple[Watcher | str, ...] = ()
    """The user's own watchers, on process 0: by value, or by name (`module:Class`, `path/to/file.py:Class`)."""
    also: tuple[Watcher, ...] = ()
    """Further watchers, a copy on every process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a training: its run, status and last step."""

    run: Path
    status: str
    step: int


def make_request(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
    watchers: Sequence[Watcher | str] = (),
) -> Request:
    """Makes a Request; every other argument has a default.

    Raises:
        TaskError: `task` is no task.
        UsageError: one of `watchers` is no watcher, or names a file that does not exist.
    """
    return Request(
        task=TaskReference.of(task, fields),
        plan=as_plan(plan),
        run=Path(folder) if folder else None,
        base=Path(base),
        data=data_folder(data),
        weights=Path(weights) if weights else None,
        options=options or Options(),
        watchers=tuple(map(_checked, watchers)),
    )


def _checked(watcher: Watcher | str) -> Watcher | str:
    if isinstance(watcher, str):
        return check_name(watcher)
    if not isinstance(watcher, Watcher):
        raise UsageError(
            f"{watcher!r} is not a watcher: give an instance of a class derived from grappe.Watcher"
        )
    return watcher


def data_folder(data: Path | str | None) -> Path:
    """Returns the folder of datasets: `data`, the environment's GRAPPE_DATA, or ./data."""
    return Path(data or os.environ.get(DATA_FOLDER, "data"))
