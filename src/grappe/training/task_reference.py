"""TaskReference: a task in a form that other processes can load."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grappe import tasks
from grappe.errors import TaskError
from grappe.task import Task, check_signatures, fields, overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReference:
    """A task that other processes can load: by name and field texts, or by value from a notebook or a script."""

    name: str
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    value: Task | None = None
    root: str = ""
    """The folder that its module must come from; "": anywhere."""

    def resolve(self) -> Task:
        """Finds or unpickles the task.

        Raises:
            TaskError: the task cannot be found or made, or lacks a part.
        """
        task = (
            self.value if self.value is not None else tasks.make(tasks.find(self.name, self.root), self.texts)
        )
        for part in ("model", "data", "loss", "optimizer"):
            if not overrides(task, part):
                raise TaskError(
                    f"the task {type(task).__name__} has no {part}(): write it, see grappe.Task.{part}"
                )
        check_signatures(task)
        return task

    @classmethod
    def of(cls, task: Task | type[Task] | str, texts: Mapping[str, str] | None = None) -> TaskReference:
        """Makes a reference from a task, its class, or its name."""
        if isinstance(task, str):
            return cls(name=_absolute(task), texts=dict(texts or {}))
        value = task() if isinstance(task, type) else task
        if not isinstance(value, Task):
            raise TaskError(f"{value!r} is not a task: derive its class from grappe.Task")
        kind = type(value)
        return cls(name=f"{kind.__module__}:{kind.__qualname__}", value=value)


def same_task(task: Task, description: Mapping[str, Any]) -> bool:
    """Returns whether a run's description is of this task: the same class, even if its file has moved."""
    return description.get("class") == type(task).__qualname__


def field_texts(task: Task) -> dict[str, Any]:
    """Returns the task's fields in JSON's form."""
    return {name: value if _is_plain(value) else repr(value) for name, value in fields(task).items()}


def source_hash(task: Task) -> str:
    """Hashes the task's own source text; "" if the source is not available."""
    try:
        return hashlib.sha256(inspect.getsource(type(task)).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return ""


def _absolute(name: str) -> str:
    place, colon, rest = name.partition(":")
    if place.endswith(".py"):
        return f"{Path(place).resolve()}{colon}{rest}"
    return name


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
