"""Chooses operations at random for each image of a batch: RandAugment, TrivialAugment, AutoAugment.

No branch depends on the choice, so that nothing waits for the GPU: operations are of four families, a map of
places, a table of levels, a blend with the grey image and one with the smoothed image, and each image passes through
all of them, three times unchanged. Spaces of operations and amounts are torchvision's, of 31 amounts (AutoAugment: 10).
Shapes: B images of C channels, 1 or 3, of H x W pixels.
"""

from __future__ import annotations

import enum
import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grappe.data.augment.colour import blended, grey_of, mean_of, smoothed
from grappe.data.augment.numbers import check_bytes, numbers
from grappe.errors import TaskError

_LEVELS = 256


class Operation(enum.IntEnum):
    """An operation on an image; its members say what an amount means."""

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


def apply_operations(images: Tensor, kind: Tensor, amount: Tensor, fill: int = 0) -> Tensor:
    """Applies operation `kind`, int64 [B], with its `amount`, float32 [B], to images, uint8 [B, C, H, W].

    Args:
        fill: the level of pixels that come in from outside.
    """
    images = _moved(images, kind, amount, fill)
    images = _table(images, kind, amount).gather(2, images.flatten(2).long()).view_as(images)
    unchanged = torch.ones_like(amount)
    colour = torch.where(kind == Operation.COLOUR, 1 + amount, unchanged)
    images = blended(images, grey_of(images), colour)
    return blended(images, smoothed(images), torch.where(kind == Operation.SHARPNESS, 1 + amount, unchanged))


def _moved(images: Tensor, kind: Tensor, amount: Tensor, fill: int) -> Tensor:
    """Takes each pixel from another place, to the nearest pixel, as Pillow does."""
    height, width = images.shape[2:]

    def of(operation: Operation, values: Tensor) -> Tensor:
        """Coefficients of the images that the operation is for, else 0: float32 [B, 1, 1]."""
        return torch.where(kind == operation, values, torch.zeros_like(values)).view(-1, 1, 1)

    across, down = of(Operation.SHEAR_X, amount), of(Operation.SHEAR_Y, amount)
    shift_x, shift_y = (of(side, amount.trunc()) for side in (Operation.TRANSLATE_X, Operation.TRANSLATE_Y))
    angle = torch.deg2rad(amount.double())
    cosine, sine = (of(Operation.ROTATE, values.float()) for values in (angle.cos(), angle.sin()))
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


def _table(images: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    """Returns the new level of each level in each image: uint8 [B, C, 256]."""
    level = torch.arange(_LEVELS, device=images.device)
    pixels = level.float()
    amount, kind = amount.view(-1, 1, 1), kind.view(-1, 1, 1)
    bits = amount.long().clamp(0, 8)
    mean = mean_of(grey_of(images)).view(-1, 1, 1)
    flat = images.flatten(2).long()
    # From an image's darkest level to its lightest, over 0 to 255.
    low, high = flat.amin(2, keepdim=True), flat.amax(2, keepdim=True)
    stretched = ((level - low) * 255 // (high - low).clamp(min=1)).clamp(0, 255)
    # About as many pixels of each level: Pillow's ImageOps.equalize.
    counts = torch.zeros(*images.shape[:2], _LEVELS, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    step = (flat.shape[2] - counts.gather(2, high)) // 255
    equalised = ((counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)).clamp(max=255)
    tables = {
        Operation.BRIGHTNESS: (pixels * (1 + amount)).clamp(0, 255),
        Operation.CONTRAST: (pixels * (1 + amount) + mean * (0 - amount)).clamp(0, 255),
        Operation.POSTERIZE: level & (0xFF00 >> bits),
        Operation.SOLARIZE: torch.where(pixels < amount, level, 255 - level),
        Operation.AUTOCONTRAST: torch.where(high > low, stretched, level),
        Operation.EQUALIZE: torch.where(step > 0, equalised, level),
        Operation.INVERT: 255 - level,
    }
    result = level.expand(len(images), images.shape[1], -1).to(torch.uint8)
    for operation, table in tables.items():
        result = torch.where(kind == operation, table.to(torch.uint8), result)
    return result


Op = Operation  # short, for the table
Step = tuple[int, float, int]
"""An operation, its probability, and its strength from 0 to 9."""

# Cubuk et al. 2019, "AutoAugment: Learning augmentation policies from data", tables 7 and 9, as torchvision has them
POLICIES: dict[str, tuple[tuple[Step, Step], ...]] = {
    "imagenet": (
        ((Op.POSTERIZE, 0.4, 8), (Op.ROTATE, 0.6, 9)), ((Op.SOLARIZE, 0.6, 5), (Op.AUTOCONTRAST, 0.6, 0)),
        ((Op.EQUALIZE, 0.8, 0), (Op.EQUALIZE, 0.6, 0)), ((Op.POSTERIZE, 0.6, 7), (Op.POSTERIZE, 0.6, 6)),
        ((Op.EQUALIZE, 0.4, 0), (Op.SOLARIZE, 0.2, 4)), ((Op.EQUALIZE, 0.4, 0), (Op.ROTATE, 0.8, 8)),
        ((Op.SOLARIZE, 0.6, 3), (Op.EQUALIZE, 0.6, 0)), ((Op.POSTERIZE, 0.8, 5), (Op.EQUALIZE, 1.0, 0)),
        ((Op.ROTATE, 0.2, 3), (Op.SOLARIZE, 0.6, 8)), ((Op.EQUALIZE, 0.6, 0), (Op.POSTERIZE, 0.4, 6)),
        ((Op.ROTATE, 0.8, 8), (Op.COLOUR, 0.4, 0)), ((Op.ROTATE, 0.4, 9), (Op.EQUALIZE, 0.6, 0)),
        ((Op.EQUALIZE, 0.0, 0), (Op.EQUALIZE, 0.8, 0)), ((Op.INVERT, 0.6, 0), (Op.EQUALIZE, 1.0, 0)),
        ((Op.COLOUR, 0.6, 4), (Op.CONTRAST, 1.0, 8)), ((Op.ROTATE, 0.8, 8), (Op.COLOUR, 1.0, 2)),
        ((Op.COLOUR, 0.8, 8), (Op.SOLARIZE, 0.8, 7)), ((Op.SHARPNESS, 0.4, 7), (Op.INVERT, 0.6, 0)),
        ((Op.SHEAR_X, 0.6, 5), (Op.EQUALIZE, 1.0, 0)), ((Op.COLOUR, 0.4, 0), (Op.EQUALIZE, 0.6, 0)),
        ((Op.EQUALIZE, 0.4, 0), (Op.SOLARIZE, 0.2, 4)), ((Op.SOLARIZE, 0.6, 5), (Op.AUTOCONTRAST, 0.6, 0)),
        ((Op.INVERT, 0.6, 0), (Op.EQUALIZE, 1.0, 0)), ((Op.COLOUR, 0.6, 4), (Op.CONTRAST, 1.0, 8)),
        ((Op.EQUALIZE, 0.8, 0), (Op.EQUALIZE, 0.6, 0)),
    ),
    "cifar10": (
        ((Op.INVERT, 0.1, 0), (Op.CONTRAST, 0.2, 6)), ((Op.ROTATE, 0.7, 2), (Op.TRANSLATE_X, 0.3, 9)),
        ((Op.SHARPNESS, 0.8, 1), (Op.SHARPNESS, 0.9, 3)), ((Op.SHEAR_Y, 0.5, 8), (Op.TRANSLATE_Y, 0.7, 9)),
        ((Op.AUTOCONTRAST, 0.5, 0), (Op.EQUALIZE, 0.9, 0)), ((Op.SHEAR_Y, 0.2, 7), (Op.POSTERIZE, 0.3, 7)),
        ((Op.COLOUR, 0.4, 3), (Op.BRIGHTNESS, 0.6, 7)), ((Op.SHARPNESS, 0.3, 9), (Op.BRIGHTNESS, 0.7, 9)),
        ((Op.EQUALIZE, 0.6, 0), (Op.EQUALIZE, 0.5, 0)), ((Op.CONTRAST, 0.6, 7), (Op.SHARPNESS, 0.6, 5)),
        ((Op.COLOUR, 0.7, 7), (Op.TRANSLATE_X, 0.5, 8)), ((Op.EQUALIZE, 0.3, 0), (Op.AUTOCONTRAST, 0.4, 0)),
        ((Op.TRANSLATE_Y, 0.4, 3), (Op.SHARPNESS, 0.2, 6)), ((Op.BRIGHTNESS, 0.9, 6), (Op.COLOUR, 0.2, 8)),
        ((Op.SOLARIZE, 0.5, 2), (Op.INVERT, 0.0, 0)), ((Op.EQUALIZE, 0.2, 0), (Op.AUTOCONTRAST, 0.6, 0)),
        ((Op.EQUALIZE, 0.2, 0), (Op.EQUALIZE, 0.6, 0)), ((Op.COLOUR, 0.9, 9), (Op.EQUALIZE, 0.6, 0)),
        ((Op.AUTOCONTRAST, 0.8, 0), (Op.SOLARIZE, 0.2, 8)), ((Op.BRIGHTNESS, 0.1, 3), (Op.COLOUR, 0.7, 0)),
        ((Op.SOLARIZE, 0.4, 5), (Op.AUTOCONTRAST, 0.9, 0)), ((Op.TRANSLATE_Y, 0.9, 9), (Op.TRANSLATE_Y, 0.7, 9)),
        ((Op.AUTOCONTRAST, 0.9, 0), (Op.SOLARIZE, 0.8, 3)), ((Op.EQUALIZE, 0.8, 0), (Op.INVERT, 0.1, 0)),
        ((Op.TRANSLATE_Y, 0.7, 9), (Op.AUTOCONTRAST, 0.9, 0)),
    ),
}  # fmt: skip


_BINS = 31


class _Space(NamedTuple):
    """Amounts of each operation, weak to strong."""

    shear: float
    translate: tuple[float, float]
    """Pixels, right and down."""
    rotate: float
    factor: float
    bits: float
    """Taken off at most."""
    bins: int


def rand_augment(images: Tensor, keys: Tensor, operations: int = 2, magnitude: int = 9, fill: int = 0) -> Tensor:
    """Applies `operations` of fourteen, all of one strength, to images, uint8 [B, C, H, W].

    Cubuk et al. 2020, "RandAugment: Practical automated data augmentation with a reduced search space".

    Args:
        magnitude: 0 to 30.
        fill: the level of pixels that come in from outside.
    """
    check_bytes(images, "rand_augment")
    if operations < 0 or not 0 <= magnitude < _BINS:
        raise TaskError(
            f"rand_augment: operations={operations} must be at least 0, and magnitude={magnitude} from 0 to 30"
        )
    height, width = images.shape[2:]
    space = _Space(0.3, (150 / 331 * width, 150 / 331 * height), 30.0, 0.9, 4.0, _BINS)
    uniform = numbers(keys, "rand_augment", 2 * operations)
    strength = torch.full_like(keys, magnitude)
    for number in range(operations):
        kind = (uniform[:, 2 * number] * Operation.INVERT).long()  # the last one is AutoAugment's alone
        images = apply_operations(images, kind, _amount(space, kind, strength, uniform[:, 2 * number + 1]), fill)
    return images


def trivial_augment(images: Tensor, keys: Tensor, fill: int = 0) -> Tensor:
    """Applies one of fourteen operations, of any strength, to images, uint8 [B, C, H, W].

    Müller and Hutter 2021, "TrivialAugment: Tuning-free yet state-of-the-art data augmentation": the wide space.

    Args:
        fill: the level of pixels that come in from outside.
    """
    check_bytes(images, "trivial_augment")
    space = _Space(0.99, (32.0, 32.0), 135.0, 0.99, 6.0, _BINS)
    uniform = numbers(keys, "trivial_augment", 3)
    kind = (uniform[:, 0] * Operation.INVERT).long()
    strength = (uniform[:, 1] * _BINS).long()
    return apply_operations(images, kind, _amount(space, kind, strength, uniform[:, 2]), fill)


def auto_augment(
    images: Tensor, keys: Tensor, policy: Literal["imagenet", "cifar10"] = "imagenet", fill: int = 0
) -> Tensor:
    """Applies one of 25 pairs of operations to images, uint8 [B, C, H, W], each with its probability and strength.

    Cubuk et al. 2019, "AutoAugment: Learning augmentation policies from data": the policies found on the two data sets.

    Args:
        fill: the level of pixels that come in from outside.
    """
    check_bytes(images, "auto_augment")
    if policy not in POLICIES:
        raise TaskError(f"auto_augment: policy='{policy}': it is one of {', '.join(POLICIES)}")
    height, width = images.shape[2:]
    space = _Space(0.3, (150 / 331 * width, 150 / 331 * height), 30.0, 0.9, 4.0, 10)
    uniform = numbers(keys, "auto_augment", 5)
    table = _policy(policy, images.device)
    chosen = table[(uniform[:, 0] * len(table)).long()]
    for number in range(2):
        kind, probability, strength = chosen[:, number].unbind(1)
        applies = uniform[:, 1 + 2 * number] < probability
        kind = torch.where(applies, kind, torch.zeros_like(kind)).long()
        amount = _amount(space, kind, strength.long(), uniform[:, 2 + 2 * number])
        images = apply_operations(images, kind, amount, fill)
    return images


def _amount(space: _Space, kind: Tensor, strength: Tensor, uniform: Tensor) -> Tensor:
    """Returns the amounts of operations `kind` [B] of a `strength` [B]; half of the signed amounts are negative."""
    amounts = _amounts(space, kind.device)[kind, strength]
    signed = (kind >= Operation.SHEAR_X) & (kind <= Operation.SHARPNESS)
    return torch.where(signed & (uniform < 0.5), -amounts, amounts)


# Both are kept on the device: sending a table would wait for the GPU.


@functools.lru_cache
def _policy(name: str, device: torch.device) -> Tensor:
    """Returns a policy's operations, probabilities and strengths: float32 [25, 2, 3]."""
    return torch.tensor(POLICIES[name], device=device)


@functools.lru_cache
def _amounts(space: _Space, device: torch.device) -> Tensor:
    """Returns the amounts of all operations at all strengths: float32 [15, bins]."""

    def up_to(most: float) -> Tensor:
        return torch.linspace(0.0, most, space.bins)

    table = torch.zeros(len(Operation), space.bins)
    table[[Operation.SHEAR_X, Operation.SHEAR_Y]] = up_to(space.shear)
    table[Operation.TRANSLATE_X], table[Operation.TRANSLATE_Y] = map(up_to, space.translate)
    table[Operation.ROTATE] = up_to(space.rotate)
    table[Operation.BRIGHTNESS : Operation.SHARPNESS + 1] = up_to(space.factor)
    table[Operation.POSTERIZE] = (8 - torch.arange(space.bins) / ((space.bins - 1) / space.bits)).round()
    table[Operation.SOLARIZE] = torch.linspace(255.0, 0.0, space.bins)
    return table.to(device)
