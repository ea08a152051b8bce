"""Chooses which part of a picture becomes a sample, by the sample's key, and cuts it out of its file.

Shapes: H x W pixels of the whole picture; S, the side of a sample; B images of C channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.data.draw import draw_one, mix
from grappe.data.images.decode import decoded, header_of, scale_for
from grappe.errors import TaskError

_CROP = 0x63726F70  # what a crop draws is apart from what `augment` draws with the same keys
_ATTEMPTS = 10


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


class View(Protocol):
    """Function that makes a sample of a picture's file."""

    def __call__(self, data: bytes, key: int, *, fast: bool = True) -> Tensor:
        """Returns uint8 [3, S, S]; the same bits for the same file and key."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """A random part of the picture, resized, half of them mirrored: what networks are trained on.

    Szegedy et al. 2015, "Going deeper with convolutions", section 6; area and shape are drawn as torchvision does.
    A picture twice as large as needed or more is scaled down while it is decoded.
    """

    keyed: ClassVar[bool] = True
    """Says that it draws from the key alone, so that threads may load samples."""
    size: int = 224
    """Pixels of each side of a sample."""
    area: tuple[float, float] = (0.08, 1.0)
    """Least and largest share of the picture."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest width over height."""
    flip: float = 0.5
    """Share of samples that are mirrored, left to right."""

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise TaskError(f"RandomResizedCrop: area={self.area}: shares of the picture, above 0 and at most 1")
        if not 0 < self.ratio[0] <= self.ratio[1] or not 0 <= self.flip <= 1:
            raise TaskError(
                f"RandomResizedCrop: ratio={self.ratio}, flip={self.flip}: ratios are above 0, flip is a share"
            )

    def __call__(self, data: bytes, key: int, *, fast: bool = True) -> Tensor:
        """Returns uint8 [3, S, S] of a JPEG or PNG file."""
        header = header_of(data)
        box = self.box(header.height, header.width, key)
        scale = scale_for(header, box.height, box.width, self.size)
        pixels = torch.from_numpy(decoded(data, header, scale, fast=fast))
        top, left, height, width = (round(side / scale) for side in box)
        part = resized(pixels[top : top + height, left : left + width], self.size, self.size)
        return part.flip(2) if draw_one(mix(key, _CROP, 1), 0) < self.flip else part

    def box(self, height: int, width: int, key: int) -> Box:
        """The crop of a picture: a function of its size and the sample's key."""
        key = mix(key, _CROP)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(_ATTEMPTS):
            first = 4 * attempt
            share = self.area[0] + (self.area[1] - self.area[0]) * draw_one(key, first)
            ratio = math.exp(low + (high - low) * draw_one(key, first + 1))
            wide = round(math.sqrt(height * width * share * ratio))
            tall = round(math.sqrt(height * width * share / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                top = int((height - tall + 1) * draw_one(key, first + 2))
                left = int((width - wide + 1) * draw_one(key, first + 3))
                return Box(top, left, tall, wide)
        # Hardly any crop fits into it: the largest part in the middle whose ratio is allowed.
        wide = min(width, max(1, round(height * self.ratio[1])))
        tall = min(height, max(1, round(width / self.ratio[0])))
        return Box((height - tall) // 2, (width - wide) // 2, tall, wide)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CentreCrop:
    """The middle of the picture, after its short side is resized: what networks are evaluated on."""

    keyed: ClassVar[bool] = True
    """Says that it draws from the key alone, so that threads may load samples."""
    size: int = 224
    """Pixels of each side of a sample."""
    short: int | None = None
    """Pixels of the picture's short side before the crop. Default: size x 256 / 224."""

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.side < self.size:
            raise TaskError(f"CentreCrop: short={self.short} is less than size={self.size}")

    @property
    def side(self) -> int:
        """Pixels of the picture's short side before the crop."""
        return round(self.size * 256 / 224) if self.short is None else self.short

    def __call__(self, data: bytes, key: int = 0, *, fast: bool = True) -> Tensor:
        """Returns uint8 [3, S, S] of a JPEG or PNG file; the key changes nothing."""
        pixels = shortened(data, self.side, fast=fast)
        top, left = ((length - self.size) // 2 for length in pixels.shape[1:])
        return pixels[:, top : top + self.size, left : left + self.size]


def shortened(data: bytes, short: int, *, fast: bool = True) -> Tensor:
    """Decodes a file and resizes the picture's short side to `short` pixels: uint8 [3, H, W]."""
    header = header_of(data)
    height, width = header.height, header.width
    scale = scale_for(header, height, width, short)
    pixels = torch.from_numpy(decoded(data, header, scale, fast=fast))
    least = min(height, width)
    # torchvision's rule: the long side is cut down to whole pixels
    return resized(pixels, short * height // least, short * width // least)


def resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resizes uint8 [H, W, 3] to uint8 [3, height, width], bilinear and antialiased."""
    image = pixels.permute(2, 0, 1)
    if image.shape[1:] == (height, width):
        return image
    return F.interpolate(image[None], size=(height, width), mode="bilinear", antialias=True)[0]


def _check_size(size: int) -> None:
    if not 1 <= size <= 4096:
        raise TaskError(f"size={size}: pixels of a sample's side, from 1 to 4096")


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
        """Returns float32 [B, C, H, W]; float64 in a model in float64."""
        # One new tensor, and no other: fresh memory costs more than the arithmetic.
        return images.to(self.shift.dtype, copy=True).sub_(self.shift).mul_(self.scale)
