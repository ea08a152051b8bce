"""Defines residual networks for images of any size, as a sequence of blocks.

He et al. 2015, "Deep residual learning for image recognition", arXiv:1512.03385. Shapes: B images of C channels.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Depth = Literal[18, 34, 50, 101, 152]
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Residual blocks of each of the four stages: table 1 of the paper."""
WIDTHS = (64, 128, 256, 512)
BOTTLENECK = 4
"""Output channels of a block over its width, in networks of 50 layers and more."""


class Residual(nn.Module):
    """A path of convolutions with a shortcut, which is a 1 x 1 convolution if the shape changes."""

    def __init__(self, path: nn.Sequential, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = path
        alike = stride == 1 and before == after
        self.shortcut = nn.Identity() if alike else nn.Sequential(*convolution(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet(depth: Depth, classes: int, first: nn.Sequential) -> nn.Sequential:
    """Makes a network of one unit for `first`, one for each block, and one for the last layer.

    Args:
        depth: layers with weights.
        first: [B, C, H, W] to [B, 64, H', W'].
    """
    make, wider = (_basic, 1) if depth < 50 else (_bottleneck, BOTTLENECK)
    units: list[nn.Module] = [first]
    before = WIDTHS[0]
    for stage, (count, width) in enumerate(zip(BLOCKS[depth], WIDTHS, strict=True)):
        for index in range(count):
            stride = 2 if stage and not index else 1
            units.append(Residual(make(before, width, stride), before, width * wider, stride))
            before = width * wider
    return nn.Sequential(*units, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)))


def convolution(before: int, after: int, side: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """Makes a convolution without bias and its batch normalisation."""
    return nn.Conv2d(before, after, side, stride, side // 2, bias=False), nn.BatchNorm2d(after)


def initialise(network: nn.Module) -> None:
    """Draws weights as is usual for ImageNet: normal ones by fan out; 0 for the last normalisation of each block.

    So each block begins as its shortcut alone: Goyal et al. 2017, "Accurate, large minibatch SGD", section 5.1.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Residual):
            nn.init.zeros_(module.path[-1].weight)  # type: ignore[arg-type]


def _basic(before: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*convolution(before, width, 3, stride), nn.ReLU(), *convolution(width, width, 3, 1))


def _bottleneck(before: int, width: int, stride: int) -> nn.Sequential:
    # The stride is the 3 x 3 convolution's, as everywhere since: half a percent better than the paper's.
    return nn.Sequential(
        *convolution(before, width, 1, 1), nn.ReLU(),
        *convolution(width, width, 3, stride), nn.ReLU(),
        *convolution(width, width * BOTTLENECK, 1, 1),
    )  # fmt: skip
