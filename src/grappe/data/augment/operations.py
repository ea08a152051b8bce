"""Applies one of fifteen operations to each image of a batch, another one to each: what policies choose from.

No branch depends on what was chosen, so that a GPU is never waited for: operations are of four families, a map of
places, a table of levels, a blend with the grey image and one with the smoothed image, and each image passes through
all of them, three times unchanged. Shapes: B images of C channels, 1 or 3, of H x W pixels.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from grappe.data.augment.colour import blended, grey_of, mean_of, smoothed
from grappe.data.augment.numbers import exactly

_LEVELS = 256


class Operation(enum.IntEnum):
    """An operation on an image; what its amount means."""

    IDENTITY = 0
    SHEAR_X = 1
    """Pixels to the side for each pixel down."""
    SHEAR_Y = 2
    TRANSLATE_X = 3
    """Pixels, cut down to whole ones."""
    TRANSLATE_Y = 4
    ROTATE = 5
    """Degrees, counterclockwise."""
    BRIGHTNESS = 6
    """The factor less 1, as for the next three."""
    COLOUR = 7
    CONTRAST = 8
    SHARPNESS = 9
    POSTERIZE = 10
    """Bits that are kept."""
    SOLARIZE = 11
    """The level from which all are inverted, 0 to 255."""
    AUTOCONTRAST = 12
    EQUALIZE = 13
    INVERT = 14


def applied(images: Tensor, kind: Tensor, amount: Tensor, fill: int = 0) -> Tensor:
    """Applies operation `kind`, int64 [B], with its `amount`, float32 [B], to images, uint8 [B, C, H, W].

    Args:
        fill: the level of pixels that come in from outside.
    """
    images = _moved(images, kind, amount, fill)
    images = _table(images, kind, amount).gather(2, images.flatten(2).long()).view_as(images)
    one = torch.ones_like(amount)
    colour = torch.where(kind == Operation.COLOUR, 1 + amount, one)
    images = blended(images, grey_of(images), colour)
    return blended(images, smoothed(images), torch.where(kind == Operation.SHARPNESS, 1 + amount, one))


def _moved(images: Tensor, kind: Tensor, amount: Tensor, fill: int) -> Tensor:
    """Takes each pixel from another place, to the nearest pixel, as Pillow does."""
    height, width = images.shape[2:]
    across, down, shift_x, shift_y, cosine, sine = _map(kind, amount)
    device = images.device
    # centres of pixels; a rotation is around the image's middle, a shear around its corner
    y = (torch.arange(height, device=device) + 0.5)[None, :, None]
    x = (torch.arange(width, device=device) + 0.5)[None, None, :]
    turned_x = cosine * (x - width / 2) - sine * (y - height / 2) + width / 2
    turned_y = sine * (x - width / 2) + cosine * (y - height / 2) + height / 2
    rotates = (kind == Operation.ROTATE).view(-1, 1, 1)
    from_x = torch.where(rotates, turned_x, x + across * y - shift_x).floor().long()
    from_y = torch.where(rotates, turned_y, y + down * x - shift_y).floor().long()
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    place = (from_y.clamp(0, height - 1) * width + from_x.clamp(0, width - 1)).flatten(1)[:, None]
    taken = images.flatten(2).gather(2, place.expand(-1, images.shape[1], -1)).view_as(images)
    return torch.where(inside[:, None], taken, fill)


def _map(kind: Tensor, amount: Tensor) -> tuple[Tensor, ...]:
    """Returns what the places of an image are computed with, each float32 [B, 1, 1]."""

    def of(operation: Operation, values: Tensor) -> Tensor:
        return torch.where(kind == operation, values, torch.zeros_like(values)).view(-1, 1, 1)

    angle = torch.deg2rad(exactly(amount))
    return (
        of(Operation.SHEAR_X, amount),
        of(Operation.SHEAR_Y, amount),
        of(Operation.TRANSLATE_X, amount.trunc()),
        of(Operation.TRANSLATE_Y, amount.trunc()),
        of(Operation.ROTATE, angle.cos().float()),
        of(Operation.ROTATE, angle.sin().float()),
    )


def _table(images: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    """Returns what becomes of each level in each image: uint8 [B, C, 256]."""
    level = torch.arange(_LEVELS, device=images.device)
    pixels = level.float()
    amount, kind = amount.view(-1, 1, 1), kind.view(-1, 1, 1)
    bits = amount.long().clamp(0, 8)
    mean = mean_of(grey_of(images)).view(-1, 1, 1)
    tables = {
        Operation.BRIGHTNESS: (pixels * (1 + amount)).clamp(0, 255),
        Operation.CONTRAST: (pixels * (1 + amount) + mean * (0 - amount)).clamp(0, 255),
        Operation.POSTERIZE: level & (0xFF00 >> bits),
        Operation.SOLARIZE: torch.where(pixels < amount, level, 255 - level),
        Operation.AUTOCONTRAST: _stretched(images, level),
        Operation.EQUALIZE: _equalised(images),
        Operation.INVERT: 255 - level,
    }
    result = level.expand(len(images), images.shape[1], -1).to(torch.uint8)
    for operation, table in tables.items():
        result = torch.where(kind == operation, table.to(torch.uint8), result)
    return result


def _stretched(images: Tensor, level: Tensor) -> Tensor:
    """Levels from an image's darkest to its lightest, over 0 to 255: [B, C, 256]."""
    pixels = images.flatten(2)
    low = pixels.amin(2, keepdim=True).long()
    spread = pixels.amax(2, keepdim=True) - low
    stretched = ((level - low) * 255 // spread.clamp(min=1)).clamp(0, 255)
    return torch.where(spread > 0, stretched, level)


def _equalised(images: Tensor) -> Tensor:
    """Levels so that about as many pixels have each: [B, C, 256]; Pillow's ImageOps.equalize."""
    pixels = images.flatten(2).long()
    counts = torch.zeros(*images.shape[:2], _LEVELS, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    last = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    levels = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, levels, torch.arange(_LEVELS, device=images.device))
