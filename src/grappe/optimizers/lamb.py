"""LAMB: AdamW whose learning rate is scaled for each parameter, for large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from grappe.optimizers.adam import adam_direction
from grappe.optimizers.arguments import check, check_below_one
from grappe.optimizers.closure import closure_loss
from grappe.optimizers.norms import norm_pairs, ratio, with_gradient
from grappe.step.clip import local_part


class LAMB(Optimizer):
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves each parameter that has a gradient. Collective where parameters are sharded."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            parameters = with_gradient(group)
            if not parameters:
                continue
            updates = []
            for parameter in parameters:
                direction = adam_direction(parameter, self.state[parameter], group)
                updates.append(direction.add_(local_part(parameter), alpha=group["weight_decay"]))
            rates = [1.0] * len(parameters)
            if group["adapt"]:
                rates = ratio(*norm_pairs(parameters, updates)).unbind()
            for parameter, update, rate in zip(parameters, updates, rates, strict=True):
                local_part(parameter).sub_(update.mul_(group["lr"] * rate))
        return loss
