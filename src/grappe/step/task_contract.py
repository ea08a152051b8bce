"""Task contract: calls a task's methods and checks what they return; each fault has one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from grappe.checkpoint.initial import check_model
from grappe.errors import TaskError
from grappe.errors.causes import broken_package
from grappe.errors.user_code import at
from grappe.task import Task


def model_of(task: Task) -> nn.Module:
    """Makes the task's model.

    Raises:
        TaskError: it is no module.
    """
    model = task.model()
    check_model(task, model)
    return model


def optimizer_of(task: Task, named: Sequence[tuple[str, Any]]) -> torch.optim.Optimizer:
    """Makes the task's optimizer of the parameters `named`.

    Raises:
        TaskError: it returns no optimizer.
    """
    if not named:
        raise method_error(
            task,
            "model",
            "has no parameter to train: is every requires_grad False, or are its layers in a plain list instead of an "
            "nn.ModuleList?",
        )
    optimizer = task.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise method_error(
            task, "optimizer", f"returned {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise method_error(
            task,
            "optimizer",
            "returned LBFGS, which computes the loss several times a step: take an optimizer of one gradient a step, "
            "torch.optim.AdamW say",
        )
    trained = {id(parameter) for _, parameter in named}
    strangers = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in trained
    ]
    if strangers:
        raise method_error(
            task,
            "optimizer",
            f"has {len(strangers)} parameters that are not the trained model's, of shape {list(strangers[0].shape)} "
            "say: give it named_parameters, or some of them",
        )
    return optimizer


def schedule_of(task: Task, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """Makes the task's schedule.

    Raises:
        TaskError: it returns no schedule that is stepped once an optimizer step.
    """
    schedule: Any = task.schedule(optimizer, total_steps)
    if schedule is None or (
        isinstance(schedule, LRScheduler) and not isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
    ):
        return schedule
    raise method_error(
        task,
        "schedule",
        f"returned {type(schedule).__name__}: return a schedule of torch.optim.lr_scheduler that is stepped once each "
        "optimizer step, OneCycleLR say, or None",
    )


def metrics_of(task: Task, method: str = "metrics") -> dict[str, Any]:
    """Makes the task's metrics, by name.

    Args:
        method: "metrics" or "training_metrics".

    Raises:
        TaskError: it returns no mapping of torchmetrics' metrics, or a package of theirs cannot be imported.
    """
    try:
        metrics: Any = getattr(task, method)()
    except Exception as error:
        if (why := broken_package(error)) is not None:
            raise method_error(task, method, f"fails: {why}") from error
        raise
    if not isinstance(metrics, Mapping):
        raise method_error(
            task, method, f"returned {type(metrics).__name__}: return a dictionary of metrics by name"
        )
    for name, metric in metrics.items():
        if not (isinstance(metric, nn.Module) and hasattr(metric, "update") and hasattr(metric, "compute")):
            raise method_error(
                task, method, f"has {type(metric).__name__} for {name!r}: give a metric of torchmetrics"
            )
    return dict(metrics)


def method_error(task: Task, method: str, what: str) -> TaskError:
    """Returns the error that `method` of the task does `what`, with the line of the user's."""
    return TaskError(f"{type(task).__name__}.{method}() {what}{at(task, method)}")
