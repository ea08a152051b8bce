"""Both decoders give the same bits; odd and damaged files have a defined picture or one message."""

import struct
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grappe.data.images import decode
from grappe.data.images.decode import MOST_PIXELS, SCALES, NoPicture, decoded, header_of, scale_for, simplejpeg
from tests.data.images.pictures import jpeg, part, pixels, png


def test_the_fast_decoder_is_installed_for_tests() -> None:
    assert simplejpeg() is not None


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_both_decoders_give_the_same_bits(mode: str, progressive: bool, subsampling: int) -> None:
    options = {"progressive": progressive} | ({"subsampling": subsampling} if mode == "RGB" else {})
    for seed in range(12):
        data = jpeg(part(seed, 9, 400, mode), quality=30 + 6 * seed, **options)
        header = header_of(data)
        assert np.array_equal(decoded(data, header), pixels(data))
        for scale in (1, *SCALES):
            found = decoded(data, header, scale)
            assert found.shape == (-(-header.height // scale), -(-header.width // scale), 3)
            assert np.array_equal(found, decoded(data, header, scale, fast=False))


def test_scales_keep_what_is_needed() -> None:
    header = header_of(jpeg(part(0, 300, 400)))
    assert [scale_for(header, 400, side, 100) for side in (399, 400)] == [2, 4]
    assert scale_for(header, 199, 400, 100) == 1
    assert scale_for(header, 3000, 4000, 100) == 8
    assert scale_for(header_of(png(part(0))), 3000, 4000, 100) == 1


def test_grey_cmyk_and_png_have_three_channels() -> None:
    grey = jpeg(part(1, mode="L"))
    found = decoded(grey, header_of(grey))
    assert (found == found[:, :, :1]).all()
    cmyk = jpeg(part(1, mode="CMYK"))
    assert header_of(cmyk).channels == 4
    assert np.array_equal(decoded(cmyk, header_of(cmyk)), pixels(cmyk))
    for mode in ("RGB", "L", "RGBA", "P", "1", "LA"):
        named_jpeg = png(part(1, mode="RGB").convert(mode))
        found = decoded(named_jpeg, header_of(named_jpeg))
        assert np.array_equal(found, pixels(named_jpeg))
        assert found.shape[2] == 3


def test_the_orientation_of_exif_changes_nothing() -> None:
    picture = part(2)
    told = Image.Exif()
    told[0x0112] = 6  # to be turned by 90 degrees
    turned = jpeg(picture, exif=told)
    for fast in (True, False):
        assert np.array_equal(decoded(turned, header_of(turned), fast=fast), pixels(jpeg(picture)))


def frame(height: int, width: int, code: int = 0xC0, bits: int = 8, channels: int = 3) -> bytes:
    """The header of a JPEG that claims a size."""
    body = struct.pack(">BHHB", bits, height, width, channels) + bytes(3 * channels)
    return b"\xff\xd8\xff" + bytes([code]) + struct.pack(">H", len(body) + 2) + body


def png_header(height: int, width: int, bits: int = 8) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"%PDF....", r"no picture \(JPEG, .*\): it begins with 25 50 44 46"),
        (frame(65500, 65500), f"65500 x 65500 pixels: more than {MOST_PIXELS:,} are not decoded"),
        (png_header(65500, 65500), "65500 x 65500 pixels: more than"),
        (frame(0, 100), "gives 100 x 0 pixels"),
        (frame(100, 100, channels=2), "JPEG of 2 channels of 8 bits"),
        (frame(100, 100, bits=12), "of 12 bits"),
        (frame(100, 100, code=0xC3), "a rare kind"),
        (png_header(100, 100, bits=16), "PNG of 16 bits"),
        (b"\xff\xd8\xff\xe0", "its header gives no size"),
        (b"\xff\xd8\xff\xe0\x00\x04ab\x00\x00\x00\x00", "no marker where its header should have one"),
        (png_header(100, 100)[:20], "PNG without its first chunk"),
    ],
)
def test_headers_are_judged_before_memory_is_taken(data: bytes, words: str) -> None:
    with pytest.raises(NoPicture, match=words):
        header_of(data)


@pytest.mark.parametrize("fast", [True, False])
def test_a_file_that_is_cut_off_is_refused(fast: bool) -> None:
    data = jpeg(part(4, 100, 200))
    for length in (len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(NoPicture, match="damaged or cut off"):
            decoded(data[:length], header_of(data[:length]), fast=fast)
    with pytest.raises(NoPicture):
        whole = png(part(4))
        decoded(whole[: len(whole) // 2], header_of(whole))


def test_a_flipped_bit_is_seen_by_the_fast_decoder() -> None:
    """Pillow gives a wrong picture, and says nothing: the guide says so."""
    data = bytearray(jpeg(part(5, 200, 200), quality=90))
    seen = 0
    for place in range(len(data) // 2, len(data) - 2, len(data) // 60):
        damaged = data.copy()
        damaged[place] ^= 0x10
        try:
            decoded(bytes(damaged), header_of(bytes(damaged)))
        except NoPicture:
            seen += 1
    assert seen > 3


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 3000), st.integers(0, 255), st.booleans())
def test_damage_is_a_picture_or_a_message(place: int, value: int, fast: bool) -> None:
    data = bytearray(jpeg(part(6, 64, 64)))
    data[place % len(data)] = value
    try:
        header = header_of(bytes(data))
        found = decoded(bytes(data), header, fast=fast)
    except NoPicture:
        return
    assert found.shape == (header.height, header.width, 3)


def test_without_simplejpeg_pillow_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg(part(7))
    expected = decoded(data, header_of(data))
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    decode.simplejpeg.cache_clear()
    try:
        assert simplejpeg() is None
        assert np.array_equal(decoded(data, header_of(data)), expected)
    finally:
        decode.simplejpeg.cache_clear()
