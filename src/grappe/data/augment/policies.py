"""Chooses operations at random for each image of a batch: RandAugment, TrivialAugment, AutoAugment.

Spaces of operations and amounts are torchvision's, of 31 amounts (AutoAugment: 10). Images are bytes, of 1 or 3
channels. Shapes: B images of C channels, H x W pixels.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grappe.data.augment.found_policies import POLICIES
from grappe.data.augment.numbers import check_bytes, numbers
from grappe.data.augment.operations import Operation, applied
from grappe.errors import TaskError

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


def rand_augment(
    images: Tensor, keys: Tensor, operations: int = 2, magnitude: int = 9, fill: int = 0
) -> Tensor:
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
        images = applied(images, kind, _amount(space, kind, strength, uniform[:, 2 * number + 1]), fill)
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
    return applied(images, kind, _amount(space, kind, strength, uniform[:, 2]), fill)


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
        images = applied(images, kind, amount, fill)
    return images


def _amount(space: _Space, kind: Tensor, strength: Tensor, uniform: Tensor) -> Tensor:
    """Returns the amounts of operations `kind` [B] of a `strength` [B]; half of those with a sign are negative."""
    amounts = _amounts(space, kind.device)[kind, strength]
    signed = (kind >= Operation.SHEAR_X) & (kind <= Operation.SHARPNESS)
    return torch.where(signed & (uniform < 0.5), -amounts, amounts)


# Both are kept on the device: to send a table there waits for the GPU.


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
    for operation in (Operation.SHEAR_X, Operation.SHEAR_Y):
        table[operation] = up_to(space.shear)
    table[Operation.TRANSLATE_X], table[Operation.TRANSLATE_Y] = map(up_to, space.translate)
    table[Operation.ROTATE] = up_to(space.rotate)
    for operation in (Operation.BRIGHTNESS, Operation.COLOUR, Operation.CONTRAST, Operation.SHARPNESS):
        table[operation] = up_to(space.factor)
    table[Operation.POSTERIZE] = (8 - torch.arange(space.bins) / ((space.bins - 1) / space.bits)).round()
    table[Operation.SOLARIZE] = torch.linspace(255.0, 0.0, space.bins)
    return table.to(device)
