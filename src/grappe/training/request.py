"""Request: the input of a training's processes, with the user's own watchers, found by name; Result: its end."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from grappe.errors import GrappeError, UsageError, nearest, user_code
from grappe.finder import module_of_file
from grappe.plan import Plan
from grappe.training.options import Options, check_label
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import Watcher

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
    """A name for the run next to its folder's; "": none, or the one that it has."""
    base: Path = Path("runs")
    data: Path = dataclasses.field(default_factory=data_folder)
    """The folder of datasets."""
    weights: Path | None = None
    """A run or a file with initial weights."""
    with_optimizer: bool = False
    """Whether the optimizer's state and the number of epochs done in the file `weights` are taken over, too."""
    epochs_done: int | None = None
    """Epochs that the training of `weights` has done: the run begins after them. None: what the file says."""
    chosen: str = ""
    """The keys that the plan's memory= stands for, as text for the user; the plan itself has them."""
    options: Options = dataclasses.field(default_factory=Options)
    quiet: bool = False
    """Whether to print nothing but errors."""
    watchers: tuple[Watcher | str, ...] = ()
    """The user's own watchers, on process 0: by value, or by name (`module:Class`, `path/to/file.py:Class`)."""
    typed: tuple[str, ...] = ()
    """Words of the command that resumes the run, which follow if the last is `--run`; (): there is none."""
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


def make_watchers(watchers: Iterable[Watcher | str]) -> list[Watcher]:
    """Makes the watchers that are named, without arguments; returns all watchers.

    Raises:
        UsageError: a watcher cannot be found, or made.
    """
    return [_made(find_watcher(watcher), watcher) if isinstance(watcher, str) else watcher for watcher in watchers]


def find_watcher(reference: str) -> type[Watcher]:
    """Finds the watcher class that `reference` names.

    Raises:
        UsageError: there is no such class, or it cannot be imported.
    """
    place, _, name = check_name(reference).rpartition(":")
    try:
        if place.endswith(".py"):
            module = module_of_file(Path(place), "watcher")
        else:
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except GrappeError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself holds no watcher either
        raise UsageError(f"--callback={reference} cannot be loaded: {user_code.sentence(error)}") from error
    member = getattr(module, name, None)
    if not (inspect.isclass(member) and issubclass(member, Watcher)):
        if inspect.isclass(member):
            raise UsageError(f"--callback={reference}: {name} does not derive from grappe.Watcher")
        kinds = {key: value for key, value in vars(module).items() if inspect.isclass(value)}
        classes = [key for key, kind in kinds.items() if issubclass(kind, Watcher) and kind is not Watcher]
        raise UsageError(f"--callback={reference}: there is no watcher '{name}' in it: {nearest(name, classes)}")
    return member


def check_name(reference: str) -> str:
    """Returns `reference` with its file's absolute path; imports nothing.

    Raises:
        UsageError: `reference` names no class, or a file that does not exist.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(
            f"--callback={reference}: name a class, as in my_file.py:MyWatcher or package.module:MyWatcher"
        )
    if not place.endswith(".py"):
        return reference
    if not Path(place).is_file():
        raise UsageError(
            f"--callback={reference}: there is no file {place}: is the path right, relative to {Path.cwd()}?"
        )
    return f"{Path(place).resolve()}:{name}"


def _made(kind: type[Watcher], reference: str) -> Watcher:
    try:
        return kind()
    except GrappeError:
        raise
    except Exception as error:
        raise UsageError(
            f"--callback={reference}: {kind.__name__}() failed: {user_code.sentence(error)}. "
            "It is made without arguments"
        ) from error
