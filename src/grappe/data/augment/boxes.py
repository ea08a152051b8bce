"""Draws rectangles by area and shape, as torchvision does, for all images of a batch at once.

Shapes: B images of a slice, A attempts for each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grappe.data.augment.numbers import between, exactly

ATTEMPTS = 10
DRAWS = 4 * ATTEMPTS
"""Numbers that `drawn` takes for each image."""


class Boxes(NamedTuple):
    """Rectangles of pixels, each column int64 [B]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    fits: Tensor
    """bool [B]: whether one of the attempts was inside the image."""


def drawn(
    uniform: Tensor,
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    *,
    tall: bool,
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
    wanted = exactly(uniform.view(len(uniform), ATTEMPTS, 4))
    pixels = between(wanted[:, :, 0], *area) * (height * width)
    shape = between(wanted[:, :, 1], math.log(ratio[0]), math.log(ratio[1])).exp()
    long, short = (pixels * shape).sqrt().round().long(), (pixels / shape).sqrt().round().long()
    heights, widths = (long, short) if tall else (short, long)
    margin = 1 if tall else 0
    inside = (heights > 0) & (widths > 0) & (heights <= height - margin) & (widths <= width - margin)
    # the first that is inside: all before it are not
    order = torch.arange(ATTEMPTS, 0, -1, device=uniform.device)
    chosen = (inside * order).argmax(1, keepdim=True)
    h, w = heights.gather(1, chosen)[:, 0], widths.gather(1, chosen)[:, 0]
    places = wanted.gather(1, chosen[:, :, None].expand(-1, -1, 4))[:, 0]
    top = (places[:, 2] * (height - h + 1)).long()
    left = (places[:, 3] * (width - w + 1)).long()
    return Boxes(top, left, h, w, inside.any(1))


def covered(boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Returns which pixels are inside: bool [B, 1, H, W]."""
    rows = _between(size[0], boxes.top, boxes.height)
    columns = _between(size[1], boxes.left, boxes.width)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def _between(length: int, start: Tensor, count: Tensor) -> Tensor:
    places = torch.arange(length, device=start.device)
    return (places >= start[:, None]) & (places < (start + count)[:, None])
