"""Clipping: the norm of the whole gradient, wherever its parts live, each counted once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PIECE = 1 << 16  # numbers
NO_GRADIENT = "a step had no gradient at all"


def gradient_norm(parameters: Sequence[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients together, a scalar alike on every process. Collective where they are sharded.

    A gradient that is sharded over mesh axes is summed over those axes' processes; one that is replicated
    over an axis is there on each of them and counts once.

    Args:
        stages: the processes that hold the model's other parameters, where each has some.
    """
    by_axes: dict[tuple[int, ...], list[Tensor]] = {}
    groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        axes = _sharded_groups(gradient)
        key = tuple(id(group) for group in axes)
        groups[key] = axes
        by_axes.setdefault(key, []).append(_part(gradient))
    total: Tensor | None = None
    for key, gradients in by_axes.items():
        square = _square(gradients)
        for group in groups[key]:
            dist.all_reduce(square, group=group)
        total = square if total is None else total + square
    if stages is not None and total is None:
        total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    assert total is not None, NO_GRADIENT
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt().float()


def exact_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """As `gradient_norm`, to the same bits however the gradients are sharded. Collective where they are.

    Squares, relative to the largest number's, are added up as whole numbers of 2^-60: no order, no rounding.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert gradients, NO_GRADIENT
    groups = _sharded_groups(gradients[0])
    parts = [_part(one) for one in gradients]
    pieces = [piece for part in parts if part.numel() for piece in part.reshape(-1).split(PIECE)]
    device = parts[0].device
    largest = torch.zeros((), device=device)
    if pieces:
        largest = torch.stack([piece.abs().max() for piece in pieces]).max().float()
    # NaN is lost by a maximum over processes, or not, as it comes; infinity says as well that there is no norm.
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if not torch.isfinite(largest) or not largest:
        return largest
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for piece in pieces:
        squares = (piece.double() / largest.double()).square() * 2.0**30
        coarse = squares.floor()
        fine = ((squares - coarse) * 2.0**30).floor()
        sums += torch.stack([coarse.long().sum(), fine.long().sum()])
    for group in groups:
        dist.all_reduce(sums, group=group)
    total = (sums[0].double() + sums[1].double() * 2.0**-30) * 2.0**-30
    return (total.sqrt() * largest.double()).float()


def _square(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, a float64 scalar.

    By pieces, the pieces' norms in float64: on a CPU torch's float32 norm of 20 million numbers is wrong by a
    thousandth, so that a sharded and a whole gradient would be clipped differently.
    """
    pieces = [piece for gradient in gradients for piece in gradient.reshape(-1).split(PIECE)]
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _part(gradient: Tensor) -> Tensor:
    """What this process has of it."""
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _sharded_groups(gradient: Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(gradient, DTensor):
        return []
    mesh = gradient.device_mesh
    assert not any(placement.is_partial() for placement in gradient.placements), "an unreduced gradient"
    # Not only Shard: under FSDP2 beside tensor parallelism there is _StridedShard, which is none.
    return [
        mesh.get_group(axis) for axis, placed in enumerate(gradient.placements) if not placed.is_replicate()
    ]


def bounding(norm: Tensor, bound: float) -> Tensor:
    """What a gradient of this norm is multiplied by to have at most `bound`, as in torch's clip_grad_norm_."""
    return torch.clamp(bound / (norm + 1e-6), max=1.0)


def scale(parameters: Sequence[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    gradients = [_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
