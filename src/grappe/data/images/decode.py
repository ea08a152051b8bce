"""Decodes JPEG and PNG files into RGB pixels: by simplejpeg where it is installed, else by Pillow, to the same bits.

Shapes: H x W pixels of a picture, or of one scaled down while it is decoded.
"""

from __future__ import annotations

import functools
import importlib
import io
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grappe.data.images.headers import Header, NoPicture

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


def scale_for(header: Header, height: int, width: int, needed: int) -> int:
    """Returns the largest scale in which `height` x `width` pixels of a picture still have `needed` on each side."""
    if header.kind != "jpeg":
        return 1
    return next((one for one in SCALES if min(height, width) >= one * needed), 1)


def decoded(data: bytes, header: Header, scale: int = 1, *, fast: bool = True) -> Pixels:
    """Decodes a file: uint8 (ceil(H / scale), ceil(W / scale), 3), RGB.

    Grey is repeated, an alpha channel left out, CMYK converted as Pillow does. EXIF orientation is ignored: the
    pixels are as they are stored. The transform is libjpeg-turbo's accurate one (JDCT_ISLOW) with smooth
    upsampling, which both decoders take to the same bits.

    Args:
        fast: whether simplejpeg may be taken. It sees damage that Pillow passes over.

    Raises:
        NoPicture: the file is damaged or cut off.
    """
    library = simplejpeg() if fast and header.kind == "jpeg" and header.channels != 4 else None
    found = (
        _by_pillow(data, header, scale) if library is None else _by_simplejpeg(library, data, header, scale)
    )
    expected = (-(-header.height // scale), -(-header.width // scale), 3)
    if found.shape != expected:
        raise NoPicture(f"damaged: it decodes to {found.shape[1]} x {found.shape[0]} pixels")
    return found


def _by_simplejpeg(library: Any, data: bytes, header: Header, scale: int) -> Pixels:
    least = (
        {}
        if scale == 1
        else {
            "min_height": -(-header.height // scale),
            "min_width": -(-header.width // scale),
        }
    )
    try:
        return library.decode_jpeg(data, colorspace="RGB", fastdct=False, fastupsample=False, **least)
    except ValueError as error:
        raise NoPicture(f"damaged or cut off: {_sentence(error)}") from None


def _by_pillow(data: bytes, header: Header, scale: int) -> Pixels:
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
