"""Changes the colours of each image of a batch: brightness, contrast, saturation, hue.

Images are bytes. Grey values, means and smoothed pixels are whole numbers, as Pillow computes them, so that no sum
depends on its order. Shapes: B images of C channels, 1 or 3, of H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grappe.data.augment.numbers import between, check_bytes, numbers, over_pixels, quotient
from grappe.errors import TaskError

_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
# Pillow's grey of ITU-R 601-2, in 1/65536
_RED, _GREEN, _BLUE, _HALF = 19595, 38470, 7471, 0x8000


def colour_jitter(
    images: Tensor,
    keys: Tensor,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.0,
) -> Tensor:
    """Changes the colours of images, uint8 [B, C, H, W], by factors of 1 - x to 1 + x, in an order of each image's own.

    Howard 2013, "Some improvements on deep convolutional neural network based image classification", with the draws of
    torchvision's ColorJitter.

    Args:
        hue: at most this part of the circle of colours, 0 to 0.5, in both directions.
    """
    check_bytes(images, "colour_jitter")
    if min(brightness, contrast, saturation) < 0 or not 0 <= hue <= 0.5:
        raise TaskError(
            f"colour_jitter: brightness={brightness}, contrast={contrast}, saturation={saturation} must be at least 0, "
            f"and hue={hue} from 0 to 0.5"
        )
    uniform = numbers(keys, "colour_jitter", 8)
    factors = [between(uniform[:, i], max(0.0, 1 - x), 1 + x) for i, x in enumerate((brightness, contrast, saturation))]
    turn = between(uniform[:, _HUE], -hue, hue)
    order = uniform[:, 4:].argsort(dim=1, stable=True)
    for place in range(4):
        now = order[:, place]
        factor = torch.ones_like(turn)
        for kind, value in enumerate(factors):
            factor = torch.where(now == kind, value, factor)
        grey = grey_of(images)
        without = torch.where(over_pixels(now == _CONTRAST), over_pixels(mean_of(grey)), grey)
        images = blended(images, (without * over_pixels(now != _BRIGHTNESS)).float(), factor)
        if hue:
            images = torch.where(over_pixels(now == _HUE), turned(images, turn), images)
    return images


def blended(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Returns other + factor (images - other), cut off at 0 and 255: uint8 [B, C, H, W]; `factor` float32 [B]."""
    weight = over_pixels(factor)
    # Three operations, each rounded separately: a fused one's result may depend on the place in a slice.
    return (images.float() * weight + other * (1 - weight)).clamp_(0, 255).to(torch.uint8)


def grey_of(images: Tensor) -> Tensor:
    """Returns the grey values of images: int32 [B, 1, H, W]."""
    levels = images.to(torch.int32)
    if images.shape[1] == 1:
        return levels
    red, green, blue = levels.unbind(1)
    return ((red * _RED + green * _GREEN + blue * _BLUE + _HALF) >> 16)[:, None]


def mean_of(grey: Tensor) -> Tensor:
    """Returns the mean of each image's grey values, rounded: int32 [B]."""
    count = grey[0].numel()
    total = grey.sum((1, 2, 3), dtype=torch.int64)
    return ((2 * total + count) // (2 * count)).to(torch.int32)


def smoothed(images: Tensor) -> Tensor:
    """Returns images weighted with 1 around 5, over 13, rounded: float32 [B, C, H, W]; the border stays as it is."""
    levels = images.float()  # sums of up to 3,315 are exact
    if min(images.shape[2:]) < 3:
        return levels
    rows = levels[:, :, :-2] + levels[:, :, 1:-1] + levels[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * levels[:, :, 1:-1, 1:-1]
    result = levels.clone()
    result[:, :, 1:-1, 1:-1] = ((2 * total + 13) / 26).floor_()
    return result


def turned(images: Tensor, turn: Tensor) -> Tensor:
    """Returns images whose hues are moved by `turn` [B], a part of the circle, -0.5 to 0.5: uint8 [B, C, H, W].

    Smith 1978, "Color gamut transform pairs".
    """
    if images.shape[1] == 1:
        return images
    pixels = quotient(images.float(), 255)
    value, most = pixels.max(1)
    least = pixels.amin(1)
    spread = value - least
    divisor = torch.where(spread > 0, spread, 1)
    red, green, blue = pixels.unbind(1)
    sixth = torch.where(
        most == 0,
        (green - blue) / divisor,
        torch.where(most == 1, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    hue = (quotient(sixth, 6) + turn.view(-1, 1, 1)).remainder(1) * 6
    # How far each channel is below the largest: a trapezoid of the hue, moved by a third of the circle.
    below = []
    for offset in (5, 3, 1):
        place = (hue + offset).remainder(6)
        below.append(torch.minimum(place, 4 - place).clamp(0, 1))
    mixed = value[:, None] - spread[:, None] * torch.stack(below, 1)
    return (mixed * 255 + 0.5).floor_().clamp_(0, 255).to(torch.uint8)
