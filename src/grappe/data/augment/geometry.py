"""Flips, shifts, crops and erases parts of each image of a batch.

Shapes: B images of C channels, H x W pixels; S, the side of a crop; A attempts to draw a rectangle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.data.augment.numbers import (
    between,
    check_bytes,
    check_images,
    check_range,
    check_shares,
    numbers,
    over_pixels,
    quotient,
)
from grappe.errors import TaskError

ATTEMPTS = 10
DRAWS = 4 * ATTEMPTS
"""Numbers that `draw_boxes` takes for each image."""


class Boxes(NamedTuple):
    """Rectangles of pixels, each column int64 [B]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    fits: Tensor
    """bool [B]: whether one of the attempts was inside the image."""


def draw_boxes(
    uniform: Tensor, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float], *, tall: bool
) -> Boxes:
    """Returns the first of ten rectangles that is inside the image, of an area and a ratio that are drawn uniformly.

    Args:
        uniform: float32 [B, DRAWS] in [0, 1).
        size: height and width of the images.
        area: least and largest share of the image.
        ratio: the logarithm is uniform between theirs.
        tall: whether the ratio is height over width, and a side as long as the image's is too long (random erasing).
    """
    height, width = size
    attempts = uniform.view(len(uniform), ATTEMPTS, 4).double()
    pixels = between(attempts[:, :, 0], *area) * (height * width)
    shape = between(attempts[:, :, 1], math.log(ratio[0]), math.log(ratio[1])).exp()
    long, short = (pixels * shape).sqrt().round().long(), (pixels / shape).sqrt().round().long()
    heights, widths = (long, short) if tall else (short, long)
    margin = 1 if tall else 0
    inside = (heights > 0) & (widths > 0) & (heights <= height - margin) & (widths <= width - margin)
    # the first that is inside: all before it are not
    order = torch.arange(ATTEMPTS, 0, -1, device=uniform.device)
    chosen = (inside * order).argmax(1, keepdim=True)
    h, w = heights.gather(1, chosen)[:, 0], widths.gather(1, chosen)[:, 0]
    places = attempts.gather(1, chosen[:, :, None].expand(-1, -1, 4))[:, 0]
    top = (places[:, 2] * (height - h + 1)).long()
    left = (places[:, 3] * (width - w + 1)).long()
    return Boxes(top, left, h, w, inside.any(1))


def inside_boxes(boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Returns which pixels are inside: bool [B, 1, H, W]."""

    def spanned(length: int, start: Tensor, count: Tensor) -> Tensor:
        places = torch.arange(length, device=start.device)
        return (places >= start[:, None]) & (places < (start + count)[:, None])

    rows = spanned(size[0], boxes.top, boxes.height)
    columns = spanned(size[1], boxes.left, boxes.width)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


# A weight of 15 bits times a byte is 23 bits: a sum of such is exact in float32, in any order.
_UNIT = 1 << 15


def flip(images: Tensor, keys: Tensor, p: float = 0.5) -> Tensor:
    """Mirrors a share `p` of the images [B, C, H, W], left to right."""
    check_images(images, "flip")
    check_shares("flip", p=p)
    return torch.where(over_pixels(numbers(keys, "flip", 1)) < p, images.flip(3), images)


def pad_and_crop(images: Tensor, keys: Tensor, padding: int = 4, fill: float = 0) -> Tensor:
    """Shifts each image [B, C, H, W] by up to `padding` pixels; pixels from outside are `fill`.

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
    boxes = draw_boxes(
        numbers(keys, "random_resized_crop", DRAWS),
        sides,
        check_range("random_resized_crop", "area", area, 1.0),
        (low, high),
        tall=False,
    )
    height = min(sides[0], max(1, round(sides[1] / low)))  # of the part in the middle, where none fits
    width = min(sides[1], max(1, round(sides[0] * high)))
    centre = ((sides[0] - height) // 2, (sides[1] - width) // 2, height, width)
    top, left, tall, wide = (
        torch.where(boxes.fits, side, middle) for side, middle in zip(boxes[:4], centre, strict=True)
    )
    across = images.float() @ _weights(left, wide, sides[1], size).mT
    # bytes again between the two directions, as Pillow does: so the second's sums are exact, too
    down = _weights(top, tall, sides[0], size) @ (across + 0.5).floor_().clamp_(0, 255)
    return (down + 0.5).floor_().clamp_(0, 255).to(torch.uint8)


def _weights(start: Tensor, count: Tensor, length: int, size: int) -> Tensor:
    """Returns each of `length` pixels' weight in each of `size`: float32 [B, 1, size, length], multiples of 2^-15.

    A triangle around the place of the new pixel, as wide as a new pixel where that is wider than one.
    """
    step = quotient(count.double(), size)[:, None, None]
    wide = step.clamp(min=1.0)
    centres = (torch.arange(size, device=start.device)[:, None] + 0.5) * step
    places = torch.arange(length, device=start.device) - start[:, None, None]
    inside = (places >= 0) & (places < count[:, None, None])
    weight = (1 - ((places + 0.5 - centres) / wide).abs()).clamp_(min=0) * inside
    # whole numbers: their sum, too, is the same in any order
    units = (weight * _UNIT).round()
    return ((units / units.sum(2, keepdim=True) * _UNIT).round() / _UNIT).float()[:, None]


def erase(
    images: Tensor,
    keys: Tensor,
    p: float = 0.5,
    area: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    fill: float | Sequence[float] = 0,
) -> Tensor:
    """Fills a rectangle of a share `p` of the images [B, C, H, W] with `fill`.

    Zhong et al. 2017, "Random erasing data augmentation", arXiv:1708.04896, with torchvision's draws.

    Args:
        area: least and largest share of the image.
        ratio: least and largest height over width.
        fill: a value, or one for each channel.
    """
    check_images(images, "erase")
    check_shares("erase", p=p)
    shape = (images.shape[2], images.shape[3])
    uniform = numbers(keys, "erase", 1 + DRAWS)
    boxes = draw_boxes(
        uniform[:, 1:], shape, check_range("erase", "area", area, 1.0), check_range("erase", "ratio", ratio), tall=True
    )
    values = _column((fill,) if isinstance(fill, int | float) else tuple(fill), images.dtype, images.device)
    if len(values) not in (1, images.shape[1]):
        raise TaskError(f"erase: fill={fill}: give a number, or one for each of {images.shape[1]} channels")
    erased = inside_boxes(boxes, shape) & over_pixels((uniform[:, 0] < p) & boxes.fits)
    return torch.where(erased, values, images)


@functools.lru_cache
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns values [C, 1, 1], kept on the device: sending them would wait for the GPU."""
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)
