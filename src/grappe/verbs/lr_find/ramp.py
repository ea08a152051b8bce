"""Ramp: a learning rate that rises from step to step, in place of a task's schedule."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from grappe.errors import TaskError, UsageError
from grappe.task import Task

DECADES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp:
    """The rise of the learning rate of the first parameter group; the other groups keep their proportion to it."""

    kind: Literal["exponential", "linear"] = "exponential"
    """exponential: by the same factor at each step; linear: by the same amount."""
    lowest: float | None = None
    """The first learning rate. Default: a thousandth of the task's own."""
    highest: float | None = None
    """The last. Default: a thousand times the task's own."""
    steps: int = 100
    """Optimizer steps of each training."""
    seeds: int = 3
    """Trainings: of the task's seed, and of those that follow it."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 20), ("seeds", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name}={getattr(self, name)}: it must be at least {least}")
        for name in ("lowest", "highest"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name}={value}: a learning rate is above 0, and finite")
        if self.lowest is not None and self.highest is not None and self.lowest >= self.highest:
            raise UsageError(
                f"--lowest={self.lowest} is not below --highest={self.highest}: exchange them, or leave one out"
            )

    def ends(self, own: float) -> tuple[float, float]:
        """The first and the last learning rate, where the task's own is `own`.

        Raises:
            TaskError: the task's own is not above 0.
            UsageError: the first is not below the last.
        """
        if not own > 0:
            raise TaskError(
                f"the optimizer's first parameter group has lr={own:g}, which nothing can be a multiple of: "
                "give it a learning rate above 0"
            )
        low = self.lowest if self.lowest is not None else own / 10**DECADES
        high = self.highest if self.highest is not None else own * 10**DECADES
        if low >= high:
            raise UsageError(f"from {low:g} to {high:g} nothing rises: give both --lowest and --highest")
        return low, high

    def at(self, step: int, own: float) -> float:
        """The learning rate of a step, from 0."""
        low, high = self.ends(own)
        part = min(step, self.steps - 1) / (self.steps - 1)
        return low * (high / low) ** part if self.kind == "exponential" else low + (high - low) * part


def ramped(task: Task, ramp: Ramp) -> Task:
    """The task with a learning rate that rises in place of its schedule; all else is the user's."""

    def schedule(self: Task, optimizer: Any, total_steps: int) -> Any:
        from torch.optim.lr_scheduler import LambdaLR

        own = float(optimizer.param_groups[0]["lr"])
        return LambdaLR(optimizer, lambda step: ramp.at(step, own) / own)

    kind = type(task)
    methods = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__annotations__": {},
        "schedule": schedule,
    }
    made = object.__new__(type(kind.__name__, (kind,), methods))
    made.__dict__.update(task.__dict__)
    return made
