"""Erases a random rectangle of each image: random erasing (cutout with a random shape).

Shapes: B images of C channels, H x W pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from grappe.data.augment import boxes as draws
from grappe.data.augment.numbers import check_images, check_range, check_shares, numbers, over_pixels
from grappe.errors import TaskError


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
    uniform = numbers(keys, "erase", 1 + draws.DRAWS)
    found = draws.drawn(
        uniform[:, 1:],
        shape,
        check_range("erase", "area", area, 1.0),
        check_range("erase", "ratio", ratio),
        tall=True,
    )
    values = _column((fill,) if isinstance(fill, int | float) else tuple(fill), images.dtype, images.device)
    if len(values) not in (1, images.shape[1]):
        raise TaskError(f"erase: fill={fill}: give a number, or one for each of {images.shape[1]} channels")
    erased = draws.covered(found, shape) & over_pixels((uniform[:, 0] < p) & found.fits)
    return torch.where(erased, values, images)


@functools.lru_cache
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns values [C, 1, 1], kept on the device: to send them there waits for the GPU."""
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)
