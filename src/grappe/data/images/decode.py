"""Decodes pictures' files into RGB pixels, to the same bits by any decoder, and cuts a sample's part out of them.

simplejpeg decodes JPEG where it is installed, else Pillow. A file's header is parsed first, so that no decoder takes
memory for the pixels of a bomb. JPEG: ITU-T T.81, annex B. PNG: https://www.w3.org/TR/png-3/#11IHDR. Which part a
sample gets depends on its key. Shapes: H x W pixels of a picture, or of one scaled down while it is decoded; S, the
side of a sample; B images of C channels.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import math
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from grappe.data.draw import draw_one, mix
from grappe.errors import TaskError

MOST_PIXELS = 89_478_485
"""Above this Pillow warns of a decompression bomb; 268 MB of RGB."""
_PNG = b"\x89PNG\r\n\x1a\n"
_OTHERS = ("WEBP", "BMP", "GIF", "TIFF", "PPM")
_EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
_ORIENTATION = 0x0112  # EXIF 2.32, table 4
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF}  # lossless and hierarchical
_SCAN = 0xDA


class ImageHeader(NamedTuple):
    """Size and form of a picture, as its file says."""

    kind: Literal["jpeg", "png", "other"]
    height: int
    width: int
    channels: int
    """1 grey, 3 colour, 4 CMYK, of a JPEG; else 0."""


class NoPicture(ValueError):
    """A file is no picture that can be decoded; `str(error)` says why, without the file's name."""


def header_of(data: bytes) -> ImageHeader:
    """Parses the header of a picture's file, whatever its name.

    Raises:
        NoPicture: it is none, is of a kind that is not decoded, or is larger than MOST_PIXELS.
    """
    if not data:
        raise NoPicture("the file is empty")
    if data.startswith(b"\xff\xd8"):
        header = _jpeg(data)
    elif data.startswith(_PNG):
        if len(data) < 33 or data[12:16] != b"IHDR":
            raise NoPicture("damaged or cut off: a PNG without its first chunk")
        if data[24] == 16:
            raise NoPicture("PNG of 16 bits a channel, which has no one meaning in 8")
        header = ImageHeader("png", int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"), 0)
    else:
        header = _other(data)
    if header.height < 1 or header.width < 1:
        raise NoPicture(f"its header gives {header.width} x {header.height} pixels")
    if header.height * header.width > MOST_PIXELS:
        raise NoPicture(
            f"its header gives {header.width} x {header.height} pixels: more than {MOST_PIXELS:,} are not decoded"
        )
    return header


def _jpeg(data: bytes) -> ImageHeader:
    at, end = 2, len(data)
    while at + 4 <= end:
        if data[at] != 0xFF:
            raise NoPicture("damaged: no marker where its header should have one")
        code = data[at + 1]
        if code == 0xFF or code in _ALONE:  # fill bytes
            at += 1 if code == 0xFF else 2
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if code in _FRAMES and at + 10 <= end:
            bits, channels = data[at + 4], data[at + 9]
            if bits != 8 or channels not in (1, 3, 4):
                raise NoPicture(f"JPEG of {channels} channels of {bits} bits")
            return ImageHeader("jpeg", data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8], channels)
        if code in _OTHER_FRAMES:
            raise NoPicture("JPEG of a rare kind (lossless or hierarchical)")
        if code == _SCAN or length < 2:
            break
        at += 2 + length
    raise NoPicture("damaged or cut off: its header gives no size")


def _other(data: bytes) -> ImageHeader:
    """Reads the header of a kind that Pillow alone decodes; it allocates nothing for the pixels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_OTHERS) as picture:
            frames, mode, (width, height) = getattr(picture, "n_frames", 1), picture.mode, picture.size
    except Image.UnidentifiedImageError:
        kinds = ", ".join(("JPEG", "PNG", *_OTHERS))
        raise NoPicture(f"no picture ({kinds}): it begins with {data[:4].hex(' ')}") from None
    except Exception as error:  # a damaged header may raise anything
        raise NoPicture(f"damaged or cut off: {_sentence(error)}") from None
    if frames > 1:
        raise NoPicture(f"it has {frames} frames or pages, and a sample is one picture")
    if mode not in _EIGHT_BITS:
        raise NoPicture(f"pixels of the mode {mode}, which has no one meaning in 8 bits")
    return ImageHeader("other", height, width, 0)


Pixels = NDArray[np.uint8]
SCALES = (8, 4, 2)
"""Divisors by which libjpeg scales a picture for less than decoding it whole, and both decoders alike."""


@functools.cache
def simplejpeg() -> ModuleType | None:
    """simplejpeg, if it is installed (the extra `images`)."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def is_turned(data: bytes) -> bool:
    """Returns whether a file's EXIF data would turn or mirror its pixels, which stay as they are stored here."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.getexif().get(_ORIENTATION, 1) != 1
    except Exception:  # damaged in any way: what decodes it says so
        return False


def scale_for(header: ImageHeader, height: int, width: int, needed: int) -> int:
    """Returns the largest scale in which `height` x `width` pixels of a picture still have `needed` on each side."""
    if header.kind != "jpeg":
        return 1
    return next((scale for scale in SCALES if min(height, width) >= scale * needed), 1)


def decoded(data: bytes, header: ImageHeader, scale: int = 1, *, fast: bool = True) -> Pixels:
    """Decodes a file: uint8 (ceil(H / scale), ceil(W / scale), 3), RGB.

    Grey is repeated, an alpha channel left out, CMYK converted as Pillow does. EXIF orientation is ignored: the
    pixels are as they are stored. The transform is libjpeg-turbo's accurate one (JDCT_ISLOW) with smooth
    upsampling, which both decoders take to the same bits.

    Args:
        fast: whether simplejpeg may be taken. It sees damage that Pillow passes over.

    Raises:
        NoPicture: the file is damaged or cut off.
    """
    height, width = -(-header.height // scale), -(-header.width // scale)
    library = simplejpeg() if fast and header.kind == "jpeg" and header.channels != 4 else None
    if library is None:
        from PIL import Image

        formats: tuple[str, ...] = _OTHERS if header.kind == "other" else (header.kind.upper(),)
        try:
            with Image.open(io.BytesIO(data), formats=formats) as picture:
                if scale > 1:
                    picture.draft(picture.mode, (header.width // scale, header.height // scale))
                pixels = np.array(picture.convert("RGB"))  # a copy: torch warns of arrays that it may not write to
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise NoPicture(f"damaged or cut off: {_sentence(error)}") from None
    else:
        least = {"min_height": height, "min_width": width} if scale > 1 else {}
        try:
            pixels = library.decode_jpeg(data, colorspace="RGB", fastdct=False, fastupsample=False, **least)
        except ValueError as error:
            raise NoPicture(f"damaged or cut off: {_sentence(error)}") from None
    if pixels.shape != (height, width, 3):
        raise NoPicture(f"damaged: it decodes to {pixels.shape[1]} x {pixels.shape[0]} pixels")
    return pixels


def _sentence(error: Exception) -> str:
    text = str(error).partition("\n")[0].strip().rstrip(".")
    return "its content cannot be decoded" if "<_io." in text or not text else text


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
        """Returns uint8 [3, S, S] of a picture's file."""
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
        """Returns uint8 [3, S, S] of a picture's file; the key changes nothing."""
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
