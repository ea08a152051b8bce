"""Batch normalisation over the global batch, on any device, and averaging of per-process statistics.

Shapes: x [B, C, ...]; per-channel vectors [C]; W processes.
"""

from __future__ import annotations

import contextlib
import types
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from grappe.checkpoint.weights import agreed
from grappe.errors import TaskError
from grappe.launch.world import gather_into
from grappe.private_api.torch import BatchNormBase, is_traced, module_buffers

MARKS = 1 << 20
"""Number of marks of messages, each exact in float32."""


class _Normalise(torch.autograd.Function):
    """Normalises x to (x - mean) / std, with mean and variance over all processes' rows; has its own backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, rows: int, group: ProcessGroup, name: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        real = x[:rows]
        count = x.new_full((1,), float(real.numel() // channels), dtype=torch.float32)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        kind = torch.promote_types(x.dtype, torch.float32)
        if rows:
            mean = real.mean(dims, dtype=kind)
            second = (real.to(kind) - _spread(mean, x)).square().sum(dims)
        else:
            mean = second = torch.zeros(channels, dtype=kind, device=x.device)
        mean, variance, total = _combine(mean, second, count, group, name)
        inverse = torch.rsqrt(variance + eps)
        normal = (x.to(kind) - _spread(mean, x)) * _spread(inverse, x)
        ctx.save_for_backward(normal, inverse, total)
        ctx.group, ctx.dims, ctx.real = group, dims, bool(rows)
        ctx.mark_non_differentiable(mean, variance, total)
        return normal.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        normal, inverse, total = ctx.saved_tensors
        g = gradients[0].to(normal.dtype)
        sums = torch.stack([g.sum(ctx.dims), (g * normal).sum(ctx.dims)])
        dist.all_reduce(sums, group=ctx.group)
        if not ctx.real:
            return torch.zeros_like(gradients[0]), None, None, None, None  # not part of the statistics
        mean_g, mean_gn = sums / total
        result = (g - _spread(mean_g, g) - normal * _spread(mean_gn, g)) * _spread(inverse, g)
        return result.to(gradients[0].dtype), None, None, None, None


def _combine(
    mean: Tensor, second: Tensor, count: Tensor, group: ProcessGroup, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Combines each process's mean, biased variance and count over all processes.

    Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".

    Raises:
        TaskError: another process sends another message, as its forward takes another way; seen on the CPU alone.
    """
    mark = count.new_full((1,), float(zlib.crc32(name.encode()) % MARKS))
    local = torch.cat([mean, second, mark, count])
    everyone = local.new_empty(dist.get_world_size(group) * local.numel())
    gather_into(everyone, local, group)
    everyone = everyone.view(-1, local.numel())
    channels = mean.numel()
    means, seconds, marks, counts = everyone.split([channels, channels, 1, 1], dim=1)
    is_read = marks.device.type == "cpu" and not torch.compiler.is_compiling() and not is_traced(marks)
    if is_read and not torch.equal(marks, mark.to(marks.dtype).expand_as(marks)):
        raise TaskError(
            f"the batch normalisation '{name}' takes statistics of all processes' rows, but another process does not "
            "run it now: forward calls it another number of times on each, or takes another branch by its own rows. "
            "Call it equally often whatever the rows, or: --plan batchnorm=local"
        )
    total = counts.sum()
    some = total.clamp(min=1.0)  # a microbatch may be padding on all processes
    overall = (means * counts).sum(0) / some
    variance = (seconds + counts * (means - overall).square()).sum(0) / some
    return overall, variance, total


def _spread(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


IS_PADDING = "grappe_is_padding"
"""Attribute of a synchronised batch normalisation: whether the current microbatch's row is padding."""


def synchronise_batchnorm(model: nn.Module, group: ProcessGroup) -> None:
    """Makes every batch normalisation of the model use the statistics of all processes' rows while training."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase):
            _patch(module, group, name)


def _patch(module: BatchNormBase, group: ProcessGroup, name: str) -> None:
    plain = type(module).forward
    setattr(module, IS_PADDING, False)

    def forward(module: BatchNormBase, x: Tensor) -> Tensor:
        if not module.training:
            return plain(module, x)
        real = 0 if getattr(module, IS_PADDING) else len(x)
        normal, mean, variance, total = _Normalise.apply(x, module.eps, real, group, name)
        if module.track_running_stats:
            _track(module, mean, variance * (total / (total - 1)), total > 0)
        if module.affine:
            normal = normal * _spread(module.weight, x) + _spread(module.bias, x)
        return normal

    module.forward = types.MethodType(forward, module)  # a copy of the module has its own statistics


@torch.no_grad()
def _track(module: BatchNormBase, mean: Tensor, variance: Tensor, has_rows: Tensor) -> None:
    """Updates running statistics as nn.BatchNorm does, with the unbiased variance; without rows they stay."""
    batches, running_mean, running_var = module.num_batches_tracked, module.running_mean, module.running_var
    assert batches is not None and running_mean is not None and running_var is not None
    batches.add_(has_rows)
    momentum = module.momentum if module.momentum is not None else 1.0 / max(1.0, float(batches))
    running_mean.lerp_(torch.where(has_rows, mean, running_mean), momentum)
    running_var.lerp_(torch.where(has_rows, variance, running_var), momentum)


@contextlib.contextmanager
def statistics_frozen(model: nn.Module) -> Iterator[None]:
    """Context in which batch normalisation does not use its input's statistics, nor update the running ones."""
    modules = [module for module in model.modules() if isinstance(module, BatchNormBase) and module.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


@contextlib.contextmanager
def ignoring_padding(model: nn.Module) -> Iterator[None]:
    """Context in which batch normalisation ignores a padding row, in its statistics and its running averages."""
    synchronised = [module for module in model.modules() if hasattr(module, IS_PADDING)]
    if not synchronised:
        with statistics_frozen(model):
            yield
        return
    # Not frozen: the other processes' rows are real, and they wait for this process's part of the statistics.
    for module in synchronised:
        setattr(module, IS_PADDING, True)
    try:
        yield
    finally:
        for module in synchronised:
            setattr(module, IS_PADDING, False)


Kept = list[tuple[nn.Module, str, Tensor, Tensor]]


def kept_buffers(module: nn.Module) -> Kept:
    """Copies every buffer: its module, its name there, the tensor, its values."""
    return [
        (submodule, name, buffer, buffer.clone())
        for submodule in module.modules()
        for name, buffer in module_buffers(submodule).items()
        if buffer is not None
    ]


def _give_back(buffer: Tensor, values: Tensor) -> None:
    """Restores a buffer's values, and its shape, which torch's observers change in place."""
    if buffer.shape != values.shape:
        buffer.resize_(values.shape)
    buffer.copy_(values)


def replace_buffers(kept: Kept) -> None:
    """Restores the buffers as new tensors, since a backward may still read the old ones."""
    for module, name, _, values in kept:
        module_buffers(module)[name] = values.clone()


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Context of a dry run: a forward changes no buffer, and does not use its input's statistics."""
    with statistics_frozen(model), buffers_kept(model):
        yield


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Context in which a forward changes no buffer."""
    kept = kept_buffers(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in kept:  # a forward may have replaced the tensor
                _give_back(buffer, values)
                module_buffers(module)[name] = buffer


@contextlib.contextmanager
def buffers_agreed(model: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Context in which float buffers that differ between processes hold their mean. Collective over `group`."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.copy_(agreed_between(buffer, group))
    try:
        yield
    finally:
        for buffer, kept in zip(buffers, before, strict=True):
            _give_back(buffer, kept)


def agreed_between(buffer: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the mean of the processes' buffers, or the buffer itself if all are equal. Collective."""
    everyone = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, buffer.contiguous(), group=group)
    return agreed(everyone)
