"""Tensor parallelism: splits the modules that the task names over the tensor axis."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.task import Task


def split_tensors(model: nn.Module, task: Task, plan: Plan, world: World) -> None:
    """Splits the model's matrices as `task.tensor_plan` says. Collective over the tensor axis.

    Raises:
        PlanError: the task has no tensor plan.
    """
    if plan.tensor == 1:
        return
    styles = dict(task.tensor_plan(model))
    if not styles:
        raise PlanError(
            f"tensor={plan.tensor}: {type(task).__name__} does not say how its model is split; "
            "give it a tensor_plan() (see grappe/tasks/pysource.py), or use shard= instead"
        )
    assert world.mesh is not None
    parallelize_module(model, world.mesh["tensor"], styles)
