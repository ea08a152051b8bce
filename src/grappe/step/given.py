"""Checks what a task's methods give before anything is done with it: each wrong kind has one message."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from grappe.checkpoint.initial import check_model
from grappe.data.counts import flat
from grappe.errors import TaskError
from grappe.errors.imports import broken_package
from grappe.errors.user_code import at
from grappe.task import Task


class Values(NamedTuple):
    """A task's loss for some rows."""

    values: Tensor
    """Of several losses their sum; of losses of several shapes their values one after the other."""
    named: Mapping[str, Tensor]
    """Several losses by name; empty if there is one."""

    @property
    def each(self) -> tuple[Tensor, ...]:
        """Returns the values of each loss."""
        return tuple(self.named.values()) or (self.values,)


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
        TaskError: it is none.
    """
    if not named:
        raise _wrong(
            task,
            "model",
            "has no parameter to train: is every requires_grad False, or are its layers in a plain list instead of an "
            "nn.ModuleList?",
        )
    optimizer = task.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _wrong(task, "optimizer", f"returned {_kind(optimizer)}: return a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _wrong(
            task,
            "optimizer",
            "returned LBFGS, which computes the loss several times a step: take an optimizer of one gradient a step, "
            "torch.optim.AdamW say",
        )
    known = {id(parameter) for _, parameter in named}
    strangers = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in known]
    if strangers:
        raise _wrong(
            task,
            "optimizer",
            f"has {len(strangers)} parameters that are not the trained model's, of shape {list(strangers[0].shape)} "
            "say: give it named_parameters, or some of them",
        )
    return optimizer


def schedule_of(task: Task, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """Makes the task's schedule.

    Raises:
        TaskError: it is none that is stepped once an optimizer step.
    """
    schedule: Any = task.schedule(optimizer, total_steps)
    if schedule is None or (
        isinstance(schedule, LRScheduler) and not isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
    ):
        return schedule
    raise _wrong(
        task,
        "schedule",
        f"returned {_kind(schedule)}: return a schedule of torch.optim.lr_scheduler that is stepped once each "
        "optimizer step, OneCycleLR say, or None",
    )


def metrics_of(task: Task) -> dict[str, Any]:
    """Makes the task's metrics, by name.

    Raises:
        TaskError: they are no mapping of torchmetrics' metrics, or a package of theirs cannot be imported.
    """
    try:
        found: Any = task.metrics()
    except Exception as error:
        if (why := broken_package(error)) is not None:
            raise _wrong(task, "metrics", f"fails: {why}") from error
        raise
    if not isinstance(found, Mapping):
        raise _wrong(task, "metrics", f"returned {_kind(found)}: return a dictionary of metrics by name")
    for name, metric in found.items():
        if not (isinstance(metric, nn.Module) and hasattr(metric, "update") and hasattr(metric, "compute")):
            raise _wrong(task, "metrics", f"has {_kind(metric)} for {name!r}: give a metric of torchmetrics")
    return dict(found)


def loss_of(task: Task, output: Any, target: Any) -> Values:
    """Computes the task's loss.

    Raises:
        TaskError: it is no tensor of decimal numbers, and no dictionary of such tensors.
    """
    found: Any = task.loss(output, target)
    if not isinstance(found, Mapping):
        _check_loss(task, found)
        return Values(found, {})
    if not found:
        raise _wrong(task, "loss", "returned an empty dictionary: return a tensor for each loss's name")
    for name, values in found.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise _wrong(task, "loss", f"has the name {name!r}: use letters, digits and _, as in 'boxes'")
        _check_loss(task, values, f" for {name!r}")
    several = list(found.values())
    if len({values.shape for values in several}) > 1:
        return Values(flat(found), dict(found))
    return Values(functools.reduce(torch.add, several), dict(found))


def _check_loss(task: Task, values: Any, of: str = "") -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.layout != torch.strided:
        kind = str(values.dtype) if isinstance(values, Tensor) else _kind(values)
        raise _wrong(
            task, "loss", f"returned {kind}{of}: return a tensor of decimal numbers, one for each example"
        )


def _wrong(task: Task, method: str, what: str) -> TaskError:
    return TaskError(f"{type(task).__name__}.{method}() {what}{at(task, method)}")


def _kind(found: object) -> str:
    return type(found).__name__
