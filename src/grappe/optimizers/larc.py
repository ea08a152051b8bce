"""LARC: LARS whose rate is never above the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from grappe.optimizers.arguments import check, check_below_one
from grappe.optimizers.closure import closure_loss
from grappe.optimizers.norms import local_gradient, norm_pairs, ratio, with_gradient
from grappe.step.clip import local_part


class LARC(Optimizer):
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

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.02,
        adapt: bool = True,
    ) -> None:
        check("LARC", lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
        check_below_one("LARC", momentum=momentum)
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
                # Divided by lr before the minimum: 1 is also the rate of what has no norm.
                above, below = group["trust_coefficient"] * weights, (gradients + decay * weights)
                rates = ratio(above, below * group["lr"]).clamp_max(1.0).unbind()
            for parameter, slope, rate in zip(parameters, slopes, rates, strict=True):
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                weight, velocity = local_part(parameter), local_part(state["momentum_buffer"])
                gradient = slope.add(weight, alpha=decay)
                velocity.mul_(group["momentum"]).add_(gradient.mul_(rate))
                weight.sub_(velocity, alpha=group["lr"])
        return loss
