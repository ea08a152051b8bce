"""A trial's task and plan: those of the search, with the trial's fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from grappe.fields import parse
from grappe.plan import Plan
from grappe.training.task_reference import TaskReference
from grappe.verbs.tune.space import PLAN


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


def with_plan(plan: Plan, texts: Mapping[str, str]) -> Plan:
    """The plan in `texts`, with the threads of `plan` where it has none of its own; `plan` if there is none."""
    if PLAN not in texts:
        return plan
    found = Plan.parse(texts[PLAN])
    return (
        found
        if found.threads is not None or found.exact
        else dataclasses.replace(found, threads=plan.threads)
    )
