"""Flips, shifts and crops each image of a batch.

Shapes: B images of C channels, H x W pixels; S, the side of a crop.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.data.augment import boxes as draws
from grappe.data.augment.numbers import (
    check_bytes,
    check_images,
    check_range,
    check_shares,
    numbers,
    over_pixels,
)
from grappe.errors import TaskError

_ONE = 1 << 15  # a weight of 15 bits times a byte is 23 bits: a sum of such is exact in float32, in any order


def flip(images: Tensor, keys: Tensor, p: float = 0.5) -> Tensor:
    """Mirrors a share `p` of the images [B, C, H, W], left to right."""
    check_images(images, "flip")
    check_shares("flip", p=p)
    return torch.where(over_pixels(numbers(keys, "flip", 1)) < p, images.flip(3), images)


def pad_and_crop(images: Tensor, keys: Tensor, padding: int = 4, fill: float = 0) -> Tensor:
    """Shifts each image [B, C, H, W] by up to `padding` pixels; what comes in from outside is `fill`.

    He et al. 2015, "Deep residual learning", section 4.2, for CIFAR-10.
    """
    check_images(images, "pad_and_crop")
    if padding < 0:
        raise TaskError(f"pad_and_crop: padding={padding}: it must be at least 0")
    height, width = images.shape[2:]
    padded = F.pad(images, (padding,) * 4, value=fill)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: every crop
    top, left = (numbers(keys, "pad_and_crop", 2) * (2 * padding + 1)).long().T
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def random_resized_crop(
    images: Tensor,
    keys: Tensor,
    size: int,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Cuts a random part out of each image, uint8 [B, C, H, W], and resizes it: uint8 [B, C, S, S].

    Szegedy et al. 2015, "Going deeper with convolutions", section 6, with torchvision's draws; bilinear, antialiased.
    Where images lie in files, `grappe.data.RandomResizedCrop` does so while it decodes them.

    Args:
        size: S, pixels of each side of a crop.
        area: least and largest share of the image.
        ratio: least and largest width over height.
    """
    check_bytes(images, "random_resized_crop")
    if size < 1:
        raise TaskError(f"random_resized_crop: size={size}: it must be at least 1")
    sides = (images.shape[2], images.shape[3])
    low, high = check_range("random_resized_crop", "ratio", ratio)
    found = draws.drawn(
        numbers(keys, "random_resized_crop", draws.DRAWS),
        sides,
        check_range("random_resized_crop", "area", area, 1.0),
        (low, high),
        tall=False,
    )
    height = min(sides[0], max(1, round(sides[1] / low)))  # of the part in the middle, where none fits
    width = min(sides[1], max(1, round(sides[0] * high)))
    centre = ((sides[0] - height) // 2, (sides[1] - width) // 2, height, width)
    top, left, tall, wide = (
        torch.where(found.fits, one, other) for one, other in zip(found[:4], centre, strict=True)
    )
    across = images.float() @ _weights(left, wide, sides[1], size).mT
    # bytes again between the two directions, as Pillow does: so the second's sums are exact, too
    down = _weights(top, tall, sides[0], size) @ (across + 0.5).floor_().clamp_(0, 255)
    return (down + 0.5).floor_().clamp_(0, 255).to(torch.uint8)


def _weights(start: Tensor, count: Tensor, length: int, size: int) -> Tensor:
    """Returns what each of `length` pixels adds to each of `size`: float32 [B, 1, size, length], multiples of 2^-15.

    A triangle around the place of the new pixel, as wide as a new pixel where that is wider than one.
    """
    step = (count.double() / size)[:, None, None]
    wide = step.clamp(min=1.0)
    centres = (torch.arange(size, device=start.device)[:, None] + 0.5) * step
    places = torch.arange(length, device=start.device) - start[:, None, None]
    inside = (places >= 0) & (places < count[:, None, None])
    weight = (1 - ((places + 0.5 - centres) / wide).abs()).clamp_(min=0) * inside
    # whole numbers: their sum, too, is the same in any order
    whole = (weight * _ONE).round()
    return ((whole / whole.sum(2, keepdim=True) * _ONE).round() / _ONE).float()[:, None]
