"""Mixes pairs of images and their classes: mixup and cutmix.

Shapes: B images of a slice of C channels, H x W pixels; K classes.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.data.augment.geometry import Boxes, inside_boxes
from grappe.data.augment.numbers import check_images, check_shares, pair_numbers, quotient
from grappe.errors import TaskError

_STEPS = 4096  # of the table of a distribution


def mixup(
    images: Tensor, targets: Tensor, keys: Tensor, classes: int, alpha: float = 1.0, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Blends rows 2j and 2j+1 with each other: floating-point images, and the classes' probabilities [B, K].

    Zhang et al. 2018, "mixup: Beyond empirical risk minimization": weights of Beta(alpha, alpha), one a pair. Bytes
    become float32 of 0 to 255, which `grappe.data.Normalise` takes. An odd batch's last image stays as it is.

    Args:
        targets: int64 [B], or probabilities [B, K] of what was mixed before.
        classes: K.
        most: the largest weight of the other image.
    """
    check_images(images, "mixup")
    check_shares("mixup", most=most)
    partner, uniform = pair_numbers(keys, "mixup", 1)
    share = _beta(uniform[:, 0], alpha, "mixup") * most
    pixels = images if images.is_floating_point() else images.float()
    return _blend(pixels, partner, share), _blend(_probabilities(targets, classes), partner, share)


def cutmix(images: Tensor, targets: Tensor, keys: Tensor, classes: int, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """Exchanges a rectangle between rows 2j and 2j+1: images of the same type, and the classes' probabilities [B, K].

    Yun et al. 2019, "CutMix: Regularization strategy to train strong classifiers": an area of Beta(alpha, alpha), one a
    pair, of the image's shape, around any pixel, cut off at the border.

    Args:
        targets: int64 [B], or probabilities [B, K] of what was mixed before.
        classes: K.
    """
    check_images(images, "cutmix")
    height, width = images.shape[2:]
    partner, uniform = pair_numbers(keys, "cutmix", 3)
    side = 0.5 * (1 - _beta(uniform[:, 0], alpha, "cutmix")).sqrt()
    top, tall = _span(uniform[:, 1], side, height)
    left, wide = _span(uniform[:, 2], side, width)
    inside = inside_boxes(Boxes(top, left, tall, wide, tall > 0), (height, width))
    share = quotient((tall * wide).float(), height * width)
    return torch.where(inside, images[partner], images), _blend(_probabilities(targets, classes), partner, share)


def mixup_or_cutmix(
    images: Tensor, targets: Tensor, keys: Tensor, classes: int, mixup_alpha: float = 0.2, cutmix_alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Does `mixup` to half of the pairs, at random, and `cutmix` to the others; returns as `mixup` does."""
    _, uniform = pair_numbers(keys, "mixup_or_cutmix", 1)
    blended, blended_targets = mixup(images, targets, keys, classes, mixup_alpha)
    pasted, pasted_targets = cutmix(images, targets, keys, classes, cutmix_alpha)
    blends = uniform < 0.5
    mixed = torch.where(blends[:, :, None, None], blended, pasted.to(blended.dtype))
    return mixed, torch.where(blends, blended_targets, pasted_targets)


def _span(uniform: Tensor, share: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns start and count of `2 share length` places around one of `length`, cut off at both ends: int64 [B]."""
    middle, half = (uniform * length).long(), (share * length).long()
    start = (middle - half).clamp(min=0)
    return start, (middle + half).clamp(max=length) - start


def _blend(values: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    alone = partner == torch.arange(len(partner), device=partner.device)
    weight = torch.where(alone, 0, share).to(values.dtype).view(-1, *[1] * (values.dim() - 1))
    # Not torch.lerp: its rounding may depend on where a slice begins.
    return values * (1 - weight) + values[partner] * weight


def _probabilities(targets: Tensor, classes: int) -> Tensor:
    if targets.is_floating_point():
        if targets.dim() != 2 or targets.shape[1] != classes:
            raise TaskError(f"mixing: targets of {list(targets.shape)} are no probabilities [B, {classes}]")
        return targets
    return F.one_hot(targets, classes).float()


def _beta(uniform: Tensor, alpha: float, name: str) -> Tensor:
    """Returns float32 [B] of Beta(alpha, alpha), each a function of its number in [0, 1)."""
    if not 0 < alpha <= 100:
        raise TaskError(f"{name}: alpha={alpha}: it must be above 0, and at most 100")
    if alpha == 1:
        return uniform
    table = _quantiles(alpha, uniform.device)
    place = uniform * _STEPS
    below = place.long()
    weight = place - below
    return table[below] * (1 - weight) + table[below + 1] * weight


@functools.lru_cache
def _quantiles(alpha: float, device: torch.device) -> Tensor:
    """Returns the quantiles of Beta(alpha, alpha) at 0, 1/4096, … 1: float32 [4097], kept on the device.

    Its density x^(a-1) (1-x)^(a-1) has no bound at 0 for a < 1: with s = x^a it is (1 - s^(1/a))^(a-1) / a, which is
    summed up to x = 1/2; the rest is its mirror image.
    """
    s = np.linspace(0, 0.5**alpha, 1 << 16)
    density = (1 - s ** (1 / alpha)) ** (alpha - 1)
    total = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    levels = np.linspace(0, 0.5, _STEPS // 2 + 1)
    lower = np.interp(levels, total / total[-1] / 2, s) ** (1 / alpha)
    return torch.from_numpy(np.concatenate([lower, 1 - lower[-2::-1]]).astype(np.float32)).to(device)
