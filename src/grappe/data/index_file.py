"""Writes and maps the files of indexes: .npy files of bytes, which all processes of a node share.

The bytes are a hash of all that follows, the length of a JSON description, the description, then sections, each at a
multiple of 64 bytes. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.launch import files

_ALIGNED = 64
_START = 16


Made = tuple[tuple[str, ...], Sequence[NDArray[Any]]]
"""Words and arrays of one dimension."""


class Stale(Exception):
    """An index does not match the source as it is now; `str(error)` says why."""


def write(file: Path, description: bytes, sections: Sequence[NDArray[Any]]) -> None:
    """Writes an index in one step, so that nobody ever reads half of it.

    Raises:
        OSError: it cannot be written there.
    """
    laid = bytearray(bytes(8) + len(description).to_bytes(8, "little") + description)
    for section in sections:
        laid += bytes(-len(laid) % _ALIGNED)
        laid += section.tobytes()
    laid[:8] = xxhash.xxh3_64_digest(memoryview(laid)[8:])
    content = io.BytesIO()
    np.save(content, np.frombuffer(laid, np.uint8))
    files.replace(file, content.getvalue(), durable=True)


def read(file: Path) -> tuple[bytes, NDArray[np.uint8]]:
    """Maps an index: its description, and the bytes from the first section on.

    Raises:
        Stale: it cannot be read, or is damaged.
    """
    try:
        raw = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise Stale(f"it cannot be read: {error}") from None
    except Exception:  # its header is Python's text, and damage in it may raise anything
        raise Stale("it is another file, or cut off") from None
    if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or raw.ndim != 1 or len(raw) < _START:
        raise Stale("it is another file, or cut off")
    if xxhash.xxh3_64_digest(raw[8:].data) != raw[:8].tobytes():
        raise Stale("it is damaged")
    start = _START + int.from_bytes(raw[8:_START].tobytes(), "little")
    return raw[_START:start].tobytes(), raw[start + -start % _ALIGNED :]


def kept(
    places: Sequence[Path],
    identity: str,
    kinds: Sequence[np.dtype[Any]],
    make: Callable[[], Made],
    *,
    again: bool = False,
) -> tuple[tuple[str, ...], list[NDArray[Any]], Path | None]:
    """Returns words and arrays, mapped, as they were written for the same identity; else makes and writes them, once.

    Args:
        places: where the file may lie, in order of preference.
        identity: of what they are made of.
        kinds: of the arrays.
        again: whether to make them in any case.

    Returns:
        The words, the arrays, and the file; None: it could be written nowhere.
    """

    def existing() -> tuple[tuple[str, ...], list[NDArray[Any]], Path] | None:
        for file in (place for place in places if place.is_file()):
            with contextlib.suppress(Stale, msgspec.DecodeError, ValueError):
                text, rest = read(file)
                its_identity, lengths, words = msgspec.json.decode(text, type=tuple[str, list[int], tuple[str, ...]])
                if its_identity == identity and min(lengths) >= 0:
                    sizes = [length * kind.itemsize for length, kind in zip(lengths, kinds, strict=True)]
                    parts = zip(cut(rest, sizes), kinds, strict=True)
                    return words, [part.view(kind) for part, kind in parts], file
        return None

    if not again and (there := existing()) is not None:
        return there
    with files.locked(places[-1].with_suffix(".lock")):
        if not again and (there := existing()) is not None:  # another process has made it
            return there
        words, arrays = make()
        for file in places:
            with contextlib.suppress(OSError):
                write(file, msgspec.json.encode((identity, [len(each) for each in arrays], words)), arrays)
                if (there := existing()) is not None:
                    return there
        return words, list(arrays), None


def cut(rest: NDArray[np.uint8], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Cuts what `read` has mapped into sections of `sizes` bytes.

    Raises:
        Stale: they are not all that there is.
    """
    sections, start = [], 0
    for size in sizes:
        start += -start % _ALIGNED
        sections.append(np.asarray(rest[start : start + size]))
        start += size
    if start != len(rest):
        raise Stale("it is damaged")
    return sections
