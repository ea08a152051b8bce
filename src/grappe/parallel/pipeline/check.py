"""Checks that a task's units in sequence compute what its model does: on two samples, or on their shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import PlanError, user_code
from grappe.parallel.pipeline.module_calls import agree, recorded
from grappe.parallel.pipeline.units import pipeline_units
from grappe.private_api.torch import tree_leaves
from grappe.task import Task

TOLERANCE = 1e-4  # relative: the same operations in the same order give the same bits, or nearly


@torch.no_grad()
def check_units(task: Task, example: Any) -> None:
    """Runs the model, then its units in sequence, with the same dropout.

    Raises:
        PlanError: the outputs differ.
    """
    torch.set_num_threads(1)  # in a forked process
    torch.manual_seed(task.seed)
    model = task.model().train()
    units = pipeline_units(task, model)  # which may switch off what the model returns besides
    torch.manual_seed(1)
    wanted = task.forward(model, example)
    torch.manual_seed(1)
    if not _alike(wanted, _sequence(task, units, example)):
        raise _differ(task)


def check_without_values(task: Task, model: nn.Module, example: Any) -> None:
    """Checks as `check_units`, without values: the outputs' shapes, and which modules get which others' outputs.

    Raises:
        PlanError: they differ.
    """
    units = pipeline_units(task, model)
    with recorded(model) as by_model:
        wanted = task.forward(model, example)
    with recorded(model) as by_units:
        found = _sequence(task, units, example)
    if not _alike(wanted, found, lambda *_: True) or not agree(by_model, by_units):
        raise _differ(task)


def _sequence(task: Task, units: list[nn.Module], value: Any) -> Any:
    try:
        for number, unit in enumerate(units):
            value = unit(value) if number else task.forward(unit, value)
    except Exception as error:
        raise PlanError(
            f"a pipeline runs {type(task).__name__}.units() one after the other, each on the previous unit's output, "
            f"which fails: {user_code.sentence(error)}. They must be the whole model, in order"
        ) from error
    return value


def _differ(task: Task) -> PlanError:
    return PlanError(
        f"{type(task).__name__}.units(), one after the other, do not compute what the model computes, as a pipeline "
        "needs: put all other work of forward() into a unit"
    )


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * float(a.abs().max() or 1.0))


def _alike(wanted: Any, found: Any, same: Callable[[Tensor, Tensor], bool] = _close) -> bool:
    ours, theirs = tree_leaves(wanted), tree_leaves(found)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return False
        elif a.shape != b.shape or not same(a, b):
            return False
    return True
