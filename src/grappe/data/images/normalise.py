"""Defines Normalise: a layer that takes batches of bytes, so that float32 pixels travel to no device.

Shapes: B images of C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalise(nn.Module):
    """Layer that normalises images per channel: uint8 (or floats of 0 to 255) [B, C, H, W] to float32.

    (x / 255 - mean) / std. As the first layer of a model it runs on the device, on whole batches; evaluation,
    prediction and an exported program have it too.

    Args:
        mean: of each channel, of pixels in 0 to 1. Default: ImageNet's.
        std: in the same way.
    """

    def __init__(self, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(mean).view(-1, 1, 1) * 255, persistent=False)
        self.register_buffer("scale", 1 / (torch.tensor(std).view(-1, 1, 1) * 255), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns float32 [B, C, H, W]."""
        # One new tensor, and no other: fresh memory costs more than the arithmetic.
        return images.to(torch.float32, copy=True).sub_(self.shift).mul_(self.scale)
