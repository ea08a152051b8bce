"""The tasks: the shipped ones, found by their file's name, and a user's own, found by path or module."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from grappe import fields
from grappe.errors import GrappeError, TaskError, nearest
from grappe.task import Task


def names() -> list[str]:
    """The shipped tasks."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(reference: str) -> type[Task]:
    """The task class that `reference` names: `digits`, `path/to/file.py`, `file.py:Name` or `package.module:Name`.

    Raises:
        TaskError: there is none, it cannot be imported, or it is not clear which is meant.
    """
    place, _, name = reference.partition(":")
    if place.endswith(".py"):
        module = _from_file(Path(place))
    elif "." in place or name:
        module = _imported(place, place)
    elif place in names():
        module = _imported(f"{__name__}.{place}", place)
    else:
        raise TaskError(f"no task '{reference}': {nearest(place, names())}; or give path/to/file.py:Name")
    return _class_in(module, name, reference)


def make(cls: type[Task], texts: Mapping[str, str]) -> Task:
    """A task with the fields that `texts` gives.

    Raises:
        UsageError: no such field, or a value of the wrong type.
    """
    return cls(**fields.parse(cls, texts, f"task {cls.__name__}"))


def describe(cls: type[Task]) -> str:
    """The first line of the task's own words about itself."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def defaults(cls: type[Task]) -> dict[str, object]:
    """The task's fields with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(cls)}


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"no task file {path}: is the path right, seen from {Path.cwd()}?")
    name = f"grappe_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it may import its neighbours, as when it is run
    _executed(lambda: spec.loader.exec_module(module), str(path))
    return module


def _imported(name: str, shown: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return _executed(lambda: importlib.import_module(name), shown)


def _executed(load, shown: str):  # noqa: ANN001, ANN202
    try:
        return load()
    except GrappeError:
        raise
    except Exception as error:
        raise TaskError(f"the task {shown} cannot be loaded: {blame(error)}") from error


def blame(error: BaseException) -> str:
    """`error` with the innermost line of the user's own code that led to it."""
    ours = str(Path(__file__).parent.parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if not _is_library(f.filename) and (not f.filename.startswith(ours) or "/tasks/" in f.filename)
    ]
    where = f" ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
        return f"SyntaxError: {error.msg}{where}"
    return f"{type(error).__name__}: {error}{where}"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(("<frozen", sys.base_prefix))


def _class_in(module: ModuleType, name: str, reference: str) -> type[Task]:
    mine = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task) and value.__module__ == module.__name__
    }
    if name:
        found = getattr(module, name, None)
        if not (inspect.isclass(found) and issubclass(found, Task)):
            raise TaskError(f"{reference}: there is no task '{name}' in it: {nearest(name, mine)}")
        return found
    if len(mine) == 1:
        return next(iter(mine.values()))
    if not mine:
        raise TaskError(f"{reference}: there is no class in it that derives from grappe.Task")
    raise TaskError(
        f"{reference}: it has several tasks, say which: {', '.join(f'{reference}:{n}' for n in mine)}"
    )
