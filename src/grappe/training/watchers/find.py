"""Finds a user's own watcher by name: `module:Class` or `path/to/file.py:Class`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path

from grappe.errors import GrappeError, UsageError, nearest, user_code
from grappe.tasks import module_of_file
from grappe.training.watchers.base import Watcher


def make(watchers: Iterable[Watcher | str]) -> list[Watcher]:
    """Makes the watchers that are named, without arguments; returns all watchers.

    Raises:
        UsageError: a watcher cannot be found, or made.
    """
    return [_made(find(watcher), watcher) if isinstance(watcher, str) else watcher for watcher in watchers]


def find(reference: str) -> type[Watcher]:
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
