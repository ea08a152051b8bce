"""Optimizers that scale the learning rate for each parameter, for large batches: LARS, LARC and LAMB."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from grappe.optimizers.common import (
    GroupOptimizer,
    adam_direction,
    check,
    check_below_one,
    local_gradient,
    norm_pairs,
    ratio,
)
from grappe.step.clip import local_part


class LARS(GroupOptimizer):
    """Layer-wise adaptive rate scaling, for large batches of images.

    For each parameter w with gradient g, learning rate lr, weight decay b, momentum m and trust coefficient c::

        rate = c |w| / (|g| + b |w|)
        v    = m v + lr rate (g + b w)
        w    = w - v

    The norms are of the whole parameter, wherever its parts are. rate is 1 where a norm is 0, and in parameter groups
    with `adapt` False, as is usual for biases and normalisation:
    `by_name(named_parameters, {"*.bias": {"adapt": False, "weight_decay": 0.0}})`.

    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, algorithm 1.

    Raises:
        TaskError: a number is out of its range.
    """

    _limited = False
    """Whether a parameter's rate is never above the learning rate."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adapt: bool = True,
    ) -> None:
        check(type(self).__name__, lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
        check_below_one(type(self).__name__, momentum=momentum)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        slopes = [local_gradient(parameter) for parameter in parameters]
        rates = [1.0] * len(parameters)
        if group["adapt"]:
            weights, gradients = norm_pairs(parameters, slopes)
            above, below = group["trust_coefficient"] * weights, gradients + decay * weights
            # Divided by lr before the minimum: 1 is also the rate of a parameter without a norm.
            rates = ratio(above, below * (group["lr"] if self._limited else 1.0), slopes[0])
            rates = rates.clamp_max(1.0) if self._limited else rates
        for parameter, slope, rate in zip(parameters, slopes, rates, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            weight, velocity = local_part(parameter), local_part(state["momentum_buffer"])
            gradient = slope.add(weight, alpha=decay)
            inner, outer = (rate, group["lr"]) if self._limited else (group["lr"] * rate, 1.0)
            velocity.mul_(group["momentum"]).add_(gradient.mul_(inner))
            weight.sub_(velocity, alpha=outer)


class LARC(LARS):
    """Layer-wise adaptive rate control: LARS whose rate for a parameter is never above the learning rate.

    For each parameter w with gradient g, learning rate lr, weight decay b, momentum m and trust coefficient c::

        rate = min(lr, c |w| / (|g| + b |w|)) / lr
        v    = m v + rate (g + b w)
        w    = w - lr v

    So a warm-up is rarely needed, and a learning rate that is too high does no harm. The norms are of the whole
    parameter, wherever its parts are. rate is 1 where a norm is 0, and in parameter groups with `adapt` False.

    Source: the clipping of NVIDIA's apex (apex.parallel.LARC over torch.optim.SGD), after You, Gitman, Ginsburg 2017,
    arXiv:1708.03888.

    Raises:
        TaskError: a number is out of its range.
    """

    _limited = True
    __init__ = functools.partialmethod(LARS.__init__, trust_coefficient=0.02)  # type: ignore[assignment]


class LAMB(GroupOptimizer):
    """Layer-wise adaptive moments, for large batches of text.

    For each parameter w with gradient g, learning rate lr, weight decay b, betas b1 and b2::

        m, v = b1 m + (1 - b1) g, b2 v + (1 - b2) g^2
        u    = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + b w
        w    = w - lr |w| / |u| u

    The norms are of the whole parameter, wherever its parts are. |w| / |u| is 1 where a norm is 0, and in parameter
    groups with `adapt` False, which makes this AdamW, as is usual for biases and normalisation.

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv:1904.00962v5, algorithm 2, where phi is
    the identity. The gradient is not clipped first, as NVIDIA's does: that is the task's `clip`.

    Raises:
        TaskError: a number is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        check("LAMB", lr=lr, weight_decay=weight_decay, eps=eps)
        check_below_one("LAMB", beta1=betas[0], beta2=betas[1])
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults)

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            direction = adam_direction(parameter, self.state[parameter], group)
            updates.append(direction.add_(local_part(parameter), alpha=group["weight_decay"]))
        rates = [1.0] * len(parameters)
        if group["adapt"]:
            rates = ratio(*norm_pairs(parameters, updates), updates[0]).unbind()
        for parameter, update, rate in zip(parameters, updates, rates, strict=True):
            local_part(parameter).sub_(update.mul_(group["lr"] * rate))
