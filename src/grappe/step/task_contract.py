"""Task contract: calls a task's methods and checks what they return; each fault has one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from grappe.checkpoint.initial import check_model
from grappe.errors import nearest
from grappe.errors.causes import broken_package
from grappe.errors.user_code import method_error
from grappe.step.closure import needs_closure
from grappe.task import Task


def model_of(task: Task) -> nn.Module:
    """Makes the task's model.

    Raises:
        TaskError: it is no module.
    """
    model = task.model()
    check_model(task, model)
    return model


def optimizer_of(task: Task, named: Sequence[tuple[str, Any]], *, closures: bool = False) -> torch.optim.Optimizer:
    """Makes the task's optimizer of the parameters `named`.

    Args:
        closures: whether optimizers that call a closure are supported.

    Raises:
        TaskError: it returns no optimizer, or an optimizer that calls a closure where none is supported.
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
        raise method_error(task, "optimizer", f"returned {type(optimizer).__name__}: return a torch.optim.Optimizer")
    if not closures and needs_closure(optimizer):
        raise method_error(
            task,
            "optimizer",
            f"returned {type(optimizer).__name__}, which computes several gradients a step by a closure. Only "
            "engine=native trains with it, without pipeline; grappe foresee does not predict it; grappe measure "
            "works. Or use an optimizer with one gradient a step, such as torch.optim.AdamW",
        )
    trained = {id(parameter) for _, parameter in named}
    strangers = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in trained
    ]
    if strangers:
        raise method_error(
            task,
            "optimizer",
            f"has {len(strangers)} parameters that are not the trained model's, such as one of shape "
            f"{list(strangers[0].shape)}: give it named_parameters, or some of them",
        )
    return optimizer


def schedule_of(task: Task, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """Makes the task's schedule; a ReduceLROnPlateau becomes a Plateau, which evaluations step.

    Raises:
        TaskError: it returns no schedule, or a ReduceLROnPlateau that its `monitor` does not fit.
    """
    schedule: Any = task.schedule(optimizer, total_steps)
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        return Plateau(task, schedule)
    if schedule is not None and not isinstance(schedule, LRScheduler):
        raise method_error(
            task,
            "schedule",
            f"returned {type(schedule).__name__}: return a schedule of torch.optim.lr_scheduler, "
            "such as OneCycleLR, or None",
        )
    return schedule


class Plateau(LRScheduler):
    """A task's ReduceLROnPlateau. Evaluations step it, with the score that the task's `monitor` names."""

    def __init__(self, task: Task, schedule: lr_scheduler.ReduceLROnPlateau) -> None:
        # Without LRScheduler's own, which would set the learning rates.
        self.optimizer, self.last_epoch = schedule.optimizer, 0
        self._task, self._schedule = task, schedule
        self.seen: list[float] = []
        """The scores so far: a new one that is given them again is where this one is."""
        name = task.monitor
        is_loss = name.startswith("loss")
        metric = None if is_loss else metrics_of(task).get(name)
        higher = False if is_loss else getattr(metric, "higher_is_better", None)
        if higher is not None and higher != (schedule.mode == "max"):
            raise method_error(
                task,
                "schedule",
                f"returned a ReduceLROnPlateau of mode={schedule.mode!r} for monitor={name!r}, of which "
                f"{'more' if higher else 'less'} is better: give it mode={'max' if higher else 'min'!r}",
            )

    def step(self, epoch: int | None = None) -> None:
        """Does nothing: an optimizer step brings no score."""

    def score(self, loss: float, metrics: Mapping[str, Any]) -> float:
        """Returns the score of an evaluation that the schedule is fed with, of its loss and metrics.

        Raises:
            TaskError: the evaluation does not have it, or it is no single number.
        """
        numbers = {"loss": loss, **metrics}
        value = numbers.get(self._task.monitor)
        if not isinstance(value, int | float):
            names = [name for name, number in numbers.items() if isinstance(number, int | float)]
            raise method_error(
                self._task,
                "schedule",
                f"returned a ReduceLROnPlateau for monitor={self._task.monitor!r}, which no evaluation has: "
                f"{nearest(self._task.monitor, names)}",
            )
        return float(value)

    def evaluated(self, score: float) -> None:
        """Steps the schedule by an evaluation's score."""
        self._schedule.step(score)
        self.seen.append(score)


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
        raise method_error(task, method, f"returned {type(metrics).__name__}: return a dictionary of metrics by name")
    for name, metric in metrics.items():
        if not (isinstance(metric, nn.Module) and hasattr(metric, "update") and hasattr(metric, "compute")):
            raise method_error(task, method, f"has {type(metric).__name__} for {name!r}: give a metric of torchmetrics")
    return dict(metrics)
