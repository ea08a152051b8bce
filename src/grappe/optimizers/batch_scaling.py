"""Batch scaling: the learning rate of a batch that is k times the usual one, and the warm-up that it needs."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler

from grappe.errors import TaskError

LrScaling = Literal["none", "linear", "sqrt"]
"""Rule for the learning rate of a batch of k times as many samples: as it is, k times it, or sqrt(k) times it."""

CHAINABLE = (
    ChainedScheduler,
    lr_scheduler.ConstantLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.ExponentialLR,
    LinearLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)
"""Schedules that modify the current rate; others compute it again at each step, whatever a warm-up did."""


def scale_factor(rule: LrScaling, *, batch_size: int, base: int) -> float:
    """Returns the factor from the learning rate for batches of `base` samples to the rate for `batch_size`.

    linear: for SGD (Goyal et al. 2017, "Accurate, large minibatch SGD"). sqrt: it keeps the variance of an update
    (Krizhevsky 2014, "One weird trick"); for Adam (Malladi et al. 2022, "On the SDEs and scaling rules for adaptive
    gradient algorithms").
    """
    k = batch_size / base
    return {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]


def warmed_up(optimizer: Optimizer, schedule: LRScheduler | None, *, factor: float, steps: int) -> LRScheduler | None:
    """Returns `schedule` with a warm-up before and within it: from the rate before scaling to the scaled one.

    Args:
        schedule: of the scaled rate; None: it is constant.
        factor: what the rate was multiplied by; at 1 or below, nothing is warmed up.
        steps: optimizer steps until the scaled rate is reached.

    Raises:
        TaskError: `schedule` computes its rate from the step alone, and would undo the warm-up.
    """
    if factor <= 1 or steps < 1:
        return schedule
    if schedule is not None and not isinstance(schedule, CHAINABLE):
        raise TaskError(
            f"{type(schedule).__name__} computes its rate from the step alone and would undo the warm-up: write the "
            f"warm-up into it, without warmed_up, or take one of {', '.join(kind.__name__ for kind in CHAINABLE[1:])}"
        )
    rising = LinearLR(optimizer, start_factor=1 / factor, total_iters=steps)
    return rising if schedule is None else ChainedScheduler([rising, schedule], optimizer)
