"""Checks what a task's methods give before anything is done with it: each wrong kind has one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import TaskError
from grappe.task import Task


def model_of(task: Task) -> nn.Module:
    """Makes the task's model.

    Raises:
        TaskError: it is no module.
    """
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"{_name(task)}.model() returned {_kind(model)}: return an nn.Module")
    return model


def optimizer_of(task: Task, named: Sequence[tuple[str, Any]]) -> torch.optim.Optimizer:
    """Makes the task's optimizer of the parameters `named`.

    Raises:
        TaskError: it is none.
    """
    optimizer = task.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"{_name(task)}.optimizer() returned {_kind(optimizer)}: return a torch.optim.Optimizer"
        )
    return optimizer


def metrics_of(task: Task) -> dict[str, Any]:
    """Makes the task's metrics, by name.

    Raises:
        TaskError: they are no mapping of torchmetrics' metrics.
    """
    found: Any = task.metrics()
    if not isinstance(found, Mapping):
        raise TaskError(
            f"{_name(task)}.metrics() returned {_kind(found)}: return a dictionary of metrics by name"
        )
    for name, metric in found.items():
        if not (isinstance(metric, nn.Module) and hasattr(metric, "update") and hasattr(metric, "compute")):
            raise TaskError(
                f"{_name(task)}.metrics() has {_kind(metric)} for {name!r}: give a metric of torchmetrics"
            )
    return dict(found)


def loss_of(task: Task, output: Any, target: Any) -> Tensor:
    """The task's loss.

    Raises:
        TaskError: it is no tensor of decimal numbers.
    """
    values = task.loss(output, target)
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.layout != torch.strided:
        kind = str(values.dtype) if isinstance(values, Tensor) else _kind(values)
        raise TaskError(
            f"{_name(task)}.loss() returned {kind}: return a tensor of decimal numbers, one for each example"
        )
    return values


def _name(task: Task) -> str:
    return type(task).__name__


def _kind(found: object) -> str:
    return type(found).__name__
