"""Finds tasks: shipped ones by file name, a user's own by path or module."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from grappe import fields
from grappe.errors import GrappeError, TaskError, UsageError, nearest, user_code
from grappe.errors.causes import broken_package
from grappe.plan import Plan
from grappe.task import Task

SHIPPED = Path(__file__).with_name("tasks")


def names() -> list[str]:
    """Lists the shipped tasks."""
    return sorted(module.name for module in pkgutil.iter_modules([str(SHIPPED)]) if not module.ispkg)


def shipped(reference: str) -> str | None:
    """Returns the name of a shipped task, also of one named by its module (`grappe.tasks.digits:Digits`); else None."""
    place, _, name = reference.partition(":")
    if reference in names():
        return reference
    short = place.removeprefix("grappe.tasks.")
    return reference if short != place and short in names() and name.isidentifier() else None


def find(reference: str, root: str = "") -> type[Task]:
    """Finds the task class of `reference`: `digits`, `path/to/file.py`, `file.py:Name` or `package.module:Name`.

    Args:
        root: the folder that a module must come from; "": the working folder, or wherever Python finds it.

    Raises:
        TaskError: there is no such task, it cannot be imported, or several tasks match.
    """
    place, _, name = reference.partition(":")
    check_name(reference)
    if place == "__main__" and not hasattr(sys.modules[place], name):
        raise TaskError(
            f"the task {name} was made in a script or a notebook, and is not here: load it there, and give it "
            f"in Python, as in grappe.evaluate(run, task={name}())"
        )
    own = not place.endswith(".py") and not shipped(reference)
    if own and (folder := root or str(Path.cwd())) not in sys.path:  # from `root`, or found as in a script
        sys.path.insert(0, folder)
    from grappe.data.seeded import seeded

    try:
        # Random numbers that a file draws when it is loaded (a model's weights) are the same in every process.
        with seeded(0):
            if place.endswith(".py"):
                module = module_of_file(Path(place), "task")
            else:
                module = importlib.import_module(place if "." in place or name else f"grappe.tasks.{place}")
    except GrappeError:
        raise
    except (Exception, SystemExit) as error:  # nor is a script that ends itself a task file
        why = broken_package(error) or user_code.sentence(error)
        raise TaskError(f"the task {place} cannot be loaded: {why}") from error
    if own and root and not Path(str(module.__file__)).resolve().is_relative_to(Path(root).resolve()):
        raise TaskError(f"the task {place} was trained from {root}, and Python finds it in {module.__file__} now")
    return _class_in(module, name, reference)


def check_name(reference: str) -> None:
    """Raises TaskError if `reference` cannot name a task; imports nothing."""
    place, colon, _ = reference.partition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise TaskError(f"there is no task file {place}: is the path right, relative to {Path.cwd()}?")
    elif "=" in place:
        raise TaskError(f"'{reference}' is a field of the task: name the task before it, as in digits {reference}")
    elif "." not in place and not colon and place not in names():
        raise TaskError(f"there is no task '{reference}': {nearest(place, names())} Your own: path/to/file.py[:Name]")


def mentions(reference: str, module: str) -> bool:
    """Returns whether the task's file may import `module`, judged by its text; True without a file. Imports nothing."""
    place = reference.partition(":")[0]
    file = Path(place) if place.endswith(".py") else SHIPPED / f"{place}.py"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else module
    return module in text or (place.endswith(".py") and "grappe.tasks" in text)  # a class derived from a shipped task


def make(cls: type[Task], texts: Mapping[str, str]) -> Task:
    """Makes a task with the fields in `texts`.

    Raises:
        UsageError: there is no such field, or a value has the wrong type.
    """
    own = fields.hints(cls)
    for name, text in texts.items():
        if name not in own and name in Plan.__dataclass_fields__:
            raise UsageError(f"{name} is a key of the plan, not a field of the task: --plan {name}={text}")
    return cls(**fields.parse(cls, texts, f"task {cls.__name__}"))


def describe(cls: type[Task]) -> str:
    """Returns the first line of the task's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def defaults(cls: type[Task]) -> dict[str, object]:
    """Returns the task's fields with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(cls)}


def module_of_file(path: Path, kind: str) -> ModuleType:
    """Loads a user's file as a module of its own name; `kind` is the word for what it holds: task, watcher.

    Raises:
        TaskError: its text is not in the encoding that it names: no traceback through it could be shown.
    """
    try:
        with tokenize.open(path) as stream:
            stream.read()
    except (SyntaxError, UnicodeError) as error:
        raise TaskError(f"{path} cannot be read as Python: {error}") from error
    path, name = path.resolve(), f"grappe_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that it may import its neighbours, as when it is run
    spec.loader.exec_module(module)
    return module


def _class_in(module: ModuleType, name: str, reference: str) -> type[Task]:
    tasks_here = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task) and value.__module__ == module.__name__
    }
    if name:
        attribute = getattr(module, name, None)
        if not (inspect.isclass(attribute) and issubclass(attribute, Task)):
            raise TaskError(f"{reference}: there is no task '{name}' in it: {nearest(name, tasks_here)}")
        return attribute
    if len(tasks_here) == 1:
        return next(iter(tasks_here.values()))
    if not tasks_here:
        raise TaskError(
            f"{reference}: there is no class in it that derives from grappe.Task. A script runs as it is with grappe "
            "launch"
        )
    raise TaskError(
        f"{reference} has several tasks: {', '.join(tasks_here)}. Say which, as in "
        f"{Path(reference).name}:{next(iter(tasks_here))}"
    )
