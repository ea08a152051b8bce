"""Request: the input of a training's processes; Result: a training's end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.training.options import Options, check_label
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import Watcher
from grappe.training.watchers.find import check_name

DATA_FOLDER = "GRAPPE_DATA"


def data_folder(data: Path | str | None = None) -> Path:
    """Returns the folder of datasets: `data`, the environment's GRAPPE_DATA, or ./data."""
    return Path(data or os.environ.get(DATA_FOLDER, "data"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a training's processes: task, plan, folders and options."""

    task: TaskReference
    plan: Plan
    run: Path | None = None
    """The run's folder; None makes a new one under `base`."""
    name: str = ""
    """A name for the run, besides its folder's; "": none, or the one that it has."""
    base: Path = Path("runs")
    data: Path = dataclasses.field(default_factory=data_folder)
    """The folder of datasets."""
    weights: Path | None = None
    """A run or a file with initial weights."""
    with_optimizer: bool = False
    """Whether the optimizer's state and the number of epochs done in the file `weights` are taken over, too."""
    epochs_done: int | None = None
    """Epochs that the training of `weights` has done: the run begins after them. None: what the file says."""
    options: Options = dataclasses.field(default_factory=Options)
    quiet: bool = False
    """Whether to print nothing but errors."""
    watchers: tuple[Watcher | str, ...] = ()
    """The user's own watchers, on process 0: by value, or by name (`module:Class`, `path/to/file.py:Class`)."""
    per_process_watchers: tuple[Watcher, ...] = ()
    """Further watchers, a copy on every process."""

    def __post_init__(self) -> None:
        if self.name:
            check_label("--name", self.name)
        if self.weights is None and (self.with_optimizer or self.epochs_done is not None):
            raise UsageError("--with-optimizer and --epochs-done apply to a start from a file: add --from FILE")
        if self.epochs_done is not None and self.epochs_done < 0:
            raise UsageError(f"--epochs-done={self.epochs_done}: give 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a training: its run, status and last step."""

    run: Path
    status: str
    step: int


def checked_watchers(watchers: Iterable[Watcher | str]) -> tuple[Watcher | str, ...]:
    """Checks a user's own watchers; the names of files become absolute.

    Raises:
        UsageError: one of `watchers` is no watcher, or names a file that does not exist.
    """
    checked = []
    for watcher in watchers:
        if not isinstance(watcher, Watcher | str):
            raise UsageError(f"{watcher!r} is not a watcher: give an instance of a class derived from grappe.Watcher")
        checked.append(check_name(watcher) if isinstance(watcher, str) else watcher)
    return tuple(checked)
