"""Norms of whole parameters and gradients, wherever their parts are, and trust ratios made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.step.clip import local_part, sharded_groups


def whole_norms(parts: Sequence[Tensor], placed_as: Sequence[Tensor]) -> Tensor:
    """Computes the 2-norm of each whole tensor, float64 [n], alike on every process. Collective where sharded.

    Args:
        parts: what this process has of each tensor.
        placed_as: for each, a tensor that lies on the processes in the same way: its parameter.

    Added up in float64: in float32 a sharded and a whole tensor would differ by more than rounding (see step/clip).
    One reduction for all tensors that are sharded over the same processes.
    """
    by_axes: dict[tuple[int, ...], list[int]] = {}
    groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for number, parameter in enumerate(placed_as):
        axes = sharded_groups(parameter)
        key = tuple(id(group) for group in axes)
        groups[key] = axes
        by_axes.setdefault(key, []).append(number)
    norms: list[Tensor] = [torch.empty(0)] * len(parts)
    for key, numbers in by_axes.items():
        squares = torch.stack(
            [torch.linalg.vector_norm(parts[number], dtype=torch.float64).square() for number in numbers]
        )
        for group in groups[key]:
            dist.all_reduce(squares, group=group)
        for number, norm in zip(numbers, squares.sqrt().unbind(), strict=True):
            norms[number] = norm
    return torch.stack(norms)


def norm_pairs(parameters: Sequence[nn.Parameter], others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Computes the norms of parameters and of this process's `others`, which lie as they do: float64 [n] each.

    Collective where parameters are sharded.
    """
    parts = [local_part(parameter).detach() for parameter in parameters]
    weights, rest = whole_norms([*parts, *others], [*parameters, *parameters]).split(len(parameters))
    return weights, rest


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divides, float32 [n]; 1 where either is 0, as for a parameter that begins with zeros."""
    positive = (above > 0) & (below > 0)
    return torch.where(positive, above / below.clamp_min(torch.finfo(torch.float64).tiny), 1.0).float()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Returns what this process has of a parameter's gradient, which is there."""
    assert parameter.grad is not None
    return local_part(parameter.grad)


def with_gradient(group: dict) -> list[nn.Parameter]:
    """Lists the parameters of a group that the step moves."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]
