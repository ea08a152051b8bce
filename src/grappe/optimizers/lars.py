"""LARS: SGD with momentum whose learning rate is scaled for each parameter, for large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from grappe.optimizers.arguments import check, check_below_one
from grappe.optimizers.closure import closure_loss
from grappe.optimizers.norms import local_gradient, norm_pairs, ratio, with_gradient
from grappe.step.clip import local_part


class LARS(Optimizer):
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
        check("LARS", lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
        check_below_one("LARS", momentum=momentum)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves each parameter that has a gradient. Collective where parameters are sharded."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            parameters = with_gradient(group)
            if not parameters:
                continue
            decay = group["weight_decay"]
            slopes = [local_gradient(parameter) for parameter in parameters]
            rates = [1.0] * len(parameters)
            if group["adapt"]:
                weights, gradients = norm_pairs(parameters, slopes)
                rates = ratio(group["trust_coefficient"] * weights, gradients + decay * weights).unbind()
            for parameter, slope, rate in zip(parameters, slopes, rates, strict=True):
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                weight, velocity = local_part(parameter), local_part(state["momentum_buffer"])
                gradient = slope.add(weight, alpha=decay)
                velocity.mul_(group["momentum"]).add_(gradient.mul_(group["lr"] * rate))
                weight.sub_(velocity)
        return loss
