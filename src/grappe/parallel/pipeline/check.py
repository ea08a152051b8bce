"""Checks once that a task's units in sequence compute what its model does: in a separate process, on two samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import PlanError, user_code
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
    name = type(task).__name__
    units = pipeline_units(task, model)
    wanted = _run(task, [model], example)
    try:
        found = _run(task, units, example)
    except Exception as error:
        raise PlanError(
            f"a pipeline runs {name}.units() one after the other, each on the previous unit's output, which fails: "
            f"{user_code.sentence(error)}. They must be the whole model, in order"
        ) from error
    if not _alike(wanted, found):
        raise PlanError(
            f"{name}.units(), one after the other, do not compute what the model computes, as a pipeline needs: "
            "put all other work of forward() into a unit"
        )


def _run(task: Task, modules: list[nn.Module], value: Any) -> Any:
    torch.manual_seed(1)
    for number, module in enumerate(modules):
        value = module(value) if number else task.forward(module, value)
    return value


def _alike(wanted: Any, found: Any) -> bool:
    ours, theirs = tree_leaves(wanted), tree_leaves(found)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return False
        elif a.shape != b.shape or not torch.allclose(
            a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE * float(a.double().abs().max() or 1.0)
        ):
            return False
    return True
