"""Adam's moments with bias correction, of this process's parts: what LAMB and Muon's AdamW have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grappe.optimizers.norms import local_gradient
from grappe.step.clip import local_part


def adam_direction(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Updates the moments by the gradient and computes m / (sqrt(v) + eps), both without bias, of this process's part.

    `group` has betas and eps. Source: Kingma, Ba 2015, arXiv:1412.6980, algorithm 1.
    """
    if "step" not in state:
        state["step"] = torch.zeros(())  # a tensor, as torch's own optimizers count
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    step, (beta, second) = state["step"].item(), group["betas"]
    gradient = local_gradient(parameter)
    mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
    mean.lerp_(gradient, 1 - beta)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    below = square.sqrt().div_((1 - second**step) ** 0.5).add_(group["eps"])
    return mean.div(1 - beta**step).div_(below)
