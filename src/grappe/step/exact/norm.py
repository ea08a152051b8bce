"""Norm of the gradient with the same bits on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.step.clip import NO_GRADIENT, PIECE, local_part, sharded_groups


def exact_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Computes `clip.gradient_norm` with the same bits for any sharding of the gradients. Collective if sharded.

    Squares, relative to the largest one, are summed as integer multiples of 2^-60: independent of order, no rounding.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert gradients, NO_GRADIENT
    groups = next((sharded for gradient in gradients if (sharded := sharded_groups(gradient))), [])
    # What is whole on every process, a scalar beside sharded tensors, is counted by the first alone.
    first = all(dist.get_rank(group) == 0 for group in groups)
    parts = [local_part(gradient) for gradient in gradients if first or sharded_groups(gradient)]
    pieces = [piece for part in parts if part.numel() for piece in part.reshape(-1).split(PIECE)]
    device = local_part(gradients[0]).device
    largest = torch.zeros((), device=device)
    if pieces:
        largest = torch.stack([piece.abs().max() for piece in pieces]).max().float()
    # NaN is lost by a maximum over processes, or not, as it comes; infinity says as well that there is no norm.
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    # Where there is no norm the sums mean nothing, and are not used: to ask the device first would wait for it.
    usable = torch.isfinite(largest) & (largest > 0)
    divisor = torch.where(usable, largest, 1.0).double()
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for piece in pieces:
        squares = (piece.double() / divisor).square() * 2.0**30
        coarse = squares.floor()
        fine = ((squares - coarse) * 2.0**30).floor()
        sums += torch.stack([coarse.long().sum(), fine.long().sum()])
    for group in groups:
        dist.all_reduce(sums, group=group)
    total = (sums[0].double() + sums[1].double() * 2.0**-30) * 2.0**-30
    return torch.where(usable, (total.sqrt() * divisor).float(), largest)
