"""A trial's task: the task of the search, with the trial's fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from grappe.fields import parse
from grappe.training.task_reference import TaskReference


def with_fields(task: TaskReference, texts: Mapping[str, str]) -> TaskReference:
    """The task with the fields in `texts`.

    Raises:
        UsageError: the task refuses them.
    """
    if task.value is None:
        changed = dataclasses.replace(task, texts={**task.texts, **texts})
    else:
        kind = type(task.value)
        value = dataclasses.replace(task.value, **parse(kind, texts, f"task {kind.__name__}"))
        changed = dataclasses.replace(task, value=value)
    changed.resolve()
    return changed
