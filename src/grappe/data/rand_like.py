"""rand_like and randn_like: random numbers of the samples in the model, the same under any plan."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grappe.data.batch import InModel, SampleIds
from grappe.data.device_copy import sent
from grappe.data.draw import draw, mix, sample_keys
from grappe.errors import TaskError

_PURPOSE = 0x72616E646E  # other numbers than those that augment() draws with the same samples' keys


@torch.compiler.disable
def rand_like(like: Tensor, salt: int = 0) -> Tensor:
    """Draws uniform numbers in [0, 1), multiples of 2^-24, of the shape, type and device of `like` [B, ...].

    For the forward of a task or of its modules, and for its loss: row i depends on the task's seed, the epoch and
    sample i of the batch alone, so every plan, process and engine draws the same, and a resumed training too. Two
    calls with one `salt` give the same numbers. Evaluations draw the same each time. Where no batch of grappe's is in
    the model (`grappe.load`, an exported program), this is torch.rand_like.

    Args:
        salt: chooses other numbers, for a second draw in the same forward or loss.

    Raises:
        TaskError: `like` has not a row for each sample.
    """
    samples = InModel.samples
    if samples is None:
        return torch.rand_like(like)
    return _uniform(like, salt, samples, 1).view(like.shape).to(like.dtype)


@torch.compiler.disable
def randn_like(like: Tensor, salt: int = 0) -> Tensor:
    """Draws standard normal numbers of the shape, type and device of `like` [B, ...]; else as `rand_like`.

    By the transform of Box and Muller (1958), "A note on the generation of random normal deviates", so none is beyond
    5.8; in float64, whose errors, which differ between devices and vector lengths, do not show in float32.
    """
    samples = InModel.samples
    if samples is None:
        return torch.randn_like(like)
    pairs = _uniform(like, salt, samples, 2).view(-1, 2)
    # Each in memory of its own, in place: half of the time.
    first, second = pairs[:, 0].double(), pairs[:, 1].double()
    radius = first.neg_().log1p_().mul_(-2.0).sqrt_()
    return radius.mul_(second.mul_(2.0 * torch.pi).cos_()).view(like.shape).to(like.dtype)


def _uniform(like: Tensor, salt: int, samples: SampleIds, each: int) -> Tensor:
    """Draws `each` numbers for every element of `like`, one after the other: float32 (B, each * its numbers)."""
    size = len(samples.ids)
    if not like.dim() or len(like) != size:
        raise TaskError(
            f"grappe.rand_like and randn_like draw a row for each sample, and were given {list(like.shape)} in a batch "
            f"of {size}: give a tensor with {size} rows, or draw in augment() and hand the numbers on with the inputs"
        )
    keys = sample_keys(_seed(samples.seed, salt), samples.epoch, samples.ids)
    return draw(sent(torch.from_numpy(keys), like.device), each * (like.numel() // size))


@functools.lru_cache(maxsize=64)
def _seed(seed: int, salt: int) -> int:
    return mix(seed, _PURPOSE, salt)
