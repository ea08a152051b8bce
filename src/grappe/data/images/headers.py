"""Parses the headers of JPEG and PNG files: a picture's size, before any decoder takes memory for its pixels.

JPEG: ITU-T T.81, annex B. PNG: https://www.w3.org/TR/png-3/#11IHDR.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MOST_PIXELS = 89_478_485
"""Above this Pillow warns of a decompression bomb; 268 MB of RGB."""
_PNG = b"\x89PNG\r\n\x1a\n"
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {0xC0: True, 0xC1: True, 0xC2: True, 0xC9: True, 0xCA: True}
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF}  # lossless and hierarchical
_SCAN = 0xDA


class Header(NamedTuple):
    """Size and form of a picture, as its file says."""

    kind: Literal["jpeg", "png"]
    height: int
    width: int
    channels: int
    """1 grey, 3 colour, 4 CMYK, of a JPEG; 0 of a PNG."""


class NoPicture(ValueError):
    """A file is no picture that can be decoded; `str(error)` says why, and has no name."""


def header_of(data: bytes) -> Header:
    """Parses the header of a JPEG or PNG file, whatever its name.

    Raises:
        NoPicture: it is neither, is of a kind that is not decoded, or is larger than MOST_PIXELS.
    """
    if not data:
        raise NoPicture("the file is empty")
    if data.startswith(b"\xff\xd8"):
        found = _jpeg(data)
    elif data.startswith(_PNG):
        found = _png(data)
    else:
        raise NoPicture(f"neither JPEG nor PNG: it begins with {data[:4].hex(' ')}")
    if found.height < 1 or found.width < 1:
        raise NoPicture(f"its header says {found.width} x {found.height} pixels")
    if found.height * found.width > MOST_PIXELS:
        raise NoPicture(
            f"its header says {found.width} x {found.height} pixels: more than {MOST_PIXELS:,} are not decoded"
        )
    return found


def _jpeg(data: bytes) -> Header:
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
            return Header(
                "jpeg", data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8], channels
            )
        if code in _OTHER_FRAMES:
            raise NoPicture("JPEG of a rare kind (lossless or hierarchical)")
        if code == _SCAN or length < 2:
            break
        at += 2 + length
    raise NoPicture("damaged or cut off: its header says no size")


def _png(data: bytes) -> Header:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise NoPicture("damaged or cut off: a PNG without its first chunk")
    if data[24] == 16:
        raise NoPicture("PNG of 16 bits a channel, which has no one meaning in 8")
    return Header("png", int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"), 0)
