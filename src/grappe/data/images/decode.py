"""Decodes JPEG and PNG files into RGB pixels: by simplejpeg where it is installed, else by Pillow, to the same bits.

A file's header is parsed first, so that no decoder takes memory for the pixels of a bomb. JPEG: ITU-T T.81, annex B.
PNG: https://www.w3.org/TR/png-3/#11IHDR. Shapes: H x W pixels of a picture, or of one scaled down while it is decoded.
"""

from __future__ import annotations

import functools
import importlib
import io
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_PIXELS = 89_478_485
"""Above this Pillow warns of a decompression bomb; 268 MB of RGB."""
_PNG = b"\x89PNG\r\n\x1a\n"
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF}  # lossless and hierarchical
_SCAN = 0xDA


class ImageHeader(NamedTuple):
    """Size and form of a picture, as its file says."""

    kind: Literal["jpeg", "png"]
    height: int
    width: int
    channels: int
    """1 grey, 3 colour, 4 CMYK, of a JPEG; 0 of a PNG."""


class NoPicture(ValueError):
    """A file is no picture that can be decoded; `str(error)` says why, without the file's name."""


def header_of(data: bytes) -> ImageHeader:
    """Parses the header of a JPEG or PNG file, whatever its name.

    Raises:
        NoPicture: it is neither, is of a kind that is not decoded, or is larger than MOST_PIXELS.
    """
    if not data:
        raise NoPicture("the file is empty")
    if data.startswith(b"\xff\xd8"):
        header = _jpeg(data)
    elif data.startswith(_PNG):
        header = _png(data)
    else:
        raise NoPicture(f"neither JPEG nor PNG: it begins with {data[:4].hex(' ')}")
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


def _png(data: bytes) -> ImageHeader:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise NoPicture("damaged or cut off: a PNG without its first chunk")
    if data[24] == 16:
        raise NoPicture("PNG of 16 bits a channel, which has no one meaning in 8")
    return ImageHeader("png", int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"), 0)


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
        pixels = _by_pillow(data, header, scale)
    else:
        least = {"min_height": height, "min_width": width} if scale > 1 else {}
        try:
            pixels = library.decode_jpeg(data, colorspace="RGB", fastdct=False, fastupsample=False, **least)
        except ValueError as error:
            raise NoPicture(f"damaged or cut off: {_sentence(error)}") from None
    if pixels.shape != (height, width, 3):
        raise NoPicture(f"damaged: it decodes to {pixels.shape[1]} x {pixels.shape[0]} pixels")
    return pixels


def _by_pillow(data: bytes, header: ImageHeader, scale: int) -> Pixels:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["JPEG" if header.kind == "jpeg" else "PNG"]) as picture:
            if scale > 1:
                picture.draft(picture.mode, (header.width // scale, header.height // scale))
            return np.array(picture.convert("RGB"))  # a copy: torch warns of arrays that it may not write to
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise NoPicture(f"damaged or cut off: {_sentence(error)}") from None


def _sentence(error: Exception) -> str:
    text = str(error).partition("\n")[0].strip().rstrip(".")
    return "its content cannot be decoded" if "<_io." in text or not text else text
