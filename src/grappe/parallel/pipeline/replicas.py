"""Sums a stage's gradients over the replicas of its pipeline, after the step's last backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25_000_000  # as DistributedDataParallel's


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums each parameter's gradient over `group`; a gradient that no process has stays None. Collective.

    DistributedDataParallel is not used: its hooks need one forward before each backward, and do not support a backward
    that computes gradients of inputs and of weights separately.
    """
    missing = [number for number, one in enumerate(parameters) if one.grad is None]
    present = torch.ones(len(parameters), device=parameters[0].device)
    present[missing] = 0.0
    agreement = dist.all_reduce(present, group=group, async_op=True)
    for number in missing:
        parameters[number].grad = torch.zeros_like(parameters[number])
    flights = []
    for bucket in _buckets(parameters):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flights.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    for work, flat, bucket in flights:
        work.wait()
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, part in zip(bucket, flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
    agreement.wait()
    for number in missing:
        if not present[number]:
            parameters[number].grad = None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if bucket and (size >= BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket
