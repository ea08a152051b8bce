"""Draws the random numbers of one augmentation, separate from every other's, and checks its images.

Shapes: B images of a slice, n numbers each.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grappe.data.draw import draw, mix, mixup_pairs
from grappe.errors import TaskError


def numbers(keys: Tensor, name: str, n: int) -> Tensor:
    """Returns the numbers of the augmentation `name`, float32 [B, n] in [0, 1), for `keys` int64 [B]."""
    return draw(keys ^ mix(*name.encode()), n)


def pair_numbers(keys: Tensor, name: str, n: int) -> tuple[Tensor, Tensor]:
    """Returns each row's partner, int64 [B], and float32 [B, n], which are the same for both rows of a pair."""
    partner = mixup_pairs(len(keys), keys.device)
    first = torch.minimum(torch.arange(len(keys), device=keys.device), partner)
    return partner, numbers(keys[first], name, n)


def between(uniform: Tensor, low: float, high: float) -> Tensor:
    """Maps numbers in [0, 1) to [low, high)."""
    return uniform * (high - low) + low


def quotient(values: Tensor, number: float) -> Tensor:
    """Returns values / number with the same bits on every device.

    A GPU multiplies by the reciprocal of a number, which may round differently; it divides by a tensor.
    """
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def over_pixels(values: Tensor) -> Tensor:
    """Returns a number for each image, [B], as [B, 1, 1, 1]."""
    return values.view(-1, 1, 1, 1)


def check_images(images: Tensor, name: str) -> None:
    """Raises TaskError if `images` are not [B, C, H, W]."""
    if images.dim() != 4:
        raise TaskError(f"{name}: images are [B, C, H, W], and these have the shape {list(images.shape)}")


def check_bytes(images: Tensor, name: str) -> None:
    """Raises TaskError if `images` are not uint8 [B, 1 or 3, H, W]."""
    check_images(images, name)
    if images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
        raise TaskError(
            f"{name} takes bytes, uint8 [B, 1 or 3, H, W], and these are {images.dtype} {list(images.shape)}: "
            "normalise after it, with grappe.data.Normalise as the model's first layer"
        )


def check_shares(name: str, **shares: float) -> None:
    """Raises TaskError if one of `shares` is outside 0 to 1."""
    for word, value in shares.items():
        if not 0 <= value <= 1:
            raise TaskError(f"{name}: {word}={value}: it must be from 0 to 1")


def check_range(name: str, word: str, pair: Iterable[float], most: float = float("inf")) -> tuple[float, float]:
    """Returns (low, high) above 0 and at most `most`; raises TaskError for others."""
    low, high = pair
    if not 0 < low <= high <= most:
        raise TaskError(f"{name}: {word}=({low}, {high}): two numbers above 0, the lower one first")
    return low, high
