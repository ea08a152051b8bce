"""Session: what the processes of a verb have in common. Which task, which plan, started here or by a launcher."""

from __future__ import annotations

import dataclasses
import importlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grappe import launch, tasks
from grappe.errors import GrappeError, TaskError
from grappe.plan import Plan
from grappe.task import Task, fields
from grappe.world import Place, place_from_environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReference:
    """A task on its way to other processes: by name and field texts, or by value from a notebook or a script."""

    name: str
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    value: Task | None = None

    def resolve(self) -> Task:
        """The task itself.

        Raises:
            TaskError: it cannot be found or made.
        """
        return self.value if self.value is not None else tasks.make(tasks.find(self.name), self.texts)

    @classmethod
    def of(cls, task: Task | type[Task] | str, texts: Mapping[str, str] | None = None) -> TaskReference:
        """A reference from a task, its class, or its name."""
        if isinstance(task, str):
            return cls(name=_absolute(task), texts=dict(texts or {}))
        value = task() if isinstance(task, type) else task
        if not isinstance(value, Task):
            raise TaskError(f"{value!r} is not a task: derive its class from grappe.Task")
        kind = type(value)
        return cls(name=f"{kind.__module__}:{kind.__qualname__}", value=value)


def same_task(task: Task, description: Mapping[str, Any]) -> bool:
    """Whether a run's description is of this task: the same class, wherever its file lies now."""
    return description.get("class") == type(task).__qualname__


def field_texts(task: Task) -> dict[str, Any]:
    """The task's fields as JSON has them."""
    return {name: value if _is_plain(value) else repr(value) for name, value in fields(task).items()}


def start(function: str, request: Any, plan: Plan, *, saves: bool = False) -> Any:
    """Runs function(request, place, meet) on the plan's processes: those of torchrun or srun, or our own.

    Returns:
        What process 0 returned; under a launcher, what this process did.
    """
    place = place_from_environment()
    if place is None:
        return launch.local(function, request, plan.processes, saves=saves)
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(request, place, meeting_place(place))


def meeting_place(place: Place) -> Path:
    """A folder that all processes of this start see: shared between nodes, private to this machine else."""
    if place.size > place.local_size:
        folder = Path("runs")
    else:
        folder = Path(tempfile.gettempdir()) / f"grappe-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def user_call(task: Task, method: str, *arguments: Any) -> Any:
    """Calls a part of the task; an exception in it becomes one message that names its line."""
    try:
        return getattr(task, method)(*arguments)
    except GrappeError:
        raise
    except NotImplementedError as error:
        raise TaskError(f"{type(task).__name__} has no {method}(): a task needs it") from error
    except Exception as error:
        raise TaskError(f"{type(task).__name__}.{method}() failed: {tasks.blame(error)}") from error


def _absolute(name: str) -> str:
    place, colon, rest = name.partition(":")
    if place.endswith(".py"):
        return f"{Path(place).resolve()}{colon}{rest}"
    return name


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
