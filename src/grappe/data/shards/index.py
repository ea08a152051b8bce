"""Keeps arrays that are made of a source's files as one .npy file of bytes, mapped by all processes of a node.

The bytes are a hash of all that follows, the length of a JSON description, the description, then sections, each at a
multiple of 64 bytes. The description has the sizes and modification times of the source's files, by which a changed
source is noticed. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data.shards.open_file import Facts, facts_below, leads_out
from grappe.errors import DataError
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.launch.files import state_folder

T = TypeVar("T")
VERSION = 5
_ALIGNED = 64
_START = 16


Made = tuple[dict[str, Facts], Any, Sequence[NDArray[Any]]]
"""The facts of the source's files, more to describe them that JSON can have, and arrays of one dimension."""


class Stale(Exception):
    """An index does not match the source as it is now; `str(error)` says why."""


def places(beside: Path, room: str, name: str) -> list[Path]:
    """Lists where a file that belongs to a source may lie: beside it, or in the folder `room` of the user's own."""
    folder = state_folder(room, make=True)
    return [beside] if folder is None else [beside, folder / name]


def write(file: Path, made: Made) -> None:
    """Writes an index in one step, so that nobody ever reads half of it.

    Raises:
        OSError: it cannot be written there.
    """
    *description, arrays = made
    text = msgspec.json.encode((VERSION, [len(array) for array in arrays], description))
    laid = bytearray(bytes(8) + len(text).to_bytes(8, "little") + text)
    for array in arrays:
        laid += bytes(-len(laid) % _ALIGNED)
        laid += array.tobytes()
    laid[:8] = xxhash.xxh3_64_digest(memoryview(laid)[8:])
    content = io.BytesIO()
    np.save(content, np.frombuffer(laid, np.uint8))
    files.replace(file, content.getvalue(), durable=True)


def read(file: Path, form: Any, kinds: Sequence[np.dtype[Any]]) -> Made:
    """Maps an index: the source's files, its description, of the type `form`, and its arrays, of `kinds`.

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
    end = _START + int.from_bytes(raw[8:_START].tobytes(), "little")
    try:
        form = tuple[int, list[int], tuple[dict[str, Facts], form]]
        version, lengths, (names, more) = msgspec.json.decode(raw[_START:end].tobytes(), type=form)
    except msgspec.DecodeError:
        raise Stale("it is damaged, or another version of grappe wrote it") from None
    if (version, len(lengths)) != (VERSION, len(kinds)):
        raise Stale("another version of grappe wrote it")
    sections = []
    for length, kind in zip(lengths, kinds, strict=True):
        begin = end + -end % _ALIGNED
        end = begin + length * kind.itemsize
        sections.append((begin, end, kind))
    if min(lengths) < 0 or end != len(raw):
        raise Stale("it is damaged")
    return names, more, [np.asarray(raw[begin:end]).view(kind) for begin, end, kind in sections]


def kept(
    source: Path,
    places: Sequence[Path],
    form: Any,
    kinds: Sequence[np.dtype[Any]],
    make: Callable[[str], Made],
    check: Callable[[tuple[str, ...], Any, list[NDArray[Any]]], T],
    *,
    again: bool = False,
) -> tuple[T, Path]:
    """Returns what was kept of a source, mapped; where that is missing or stale makes and writes it, once.

    Args:
        source: the folder of the files, or the only one.
        places: where the file may lie, in order of preference, the last one in the user's own folder.
        form: the description's type.
        kinds: of the arrays.
        make: is told why what was kept cannot be taken; "": nothing was.
        check: makes the result of the files' names, the description and the arrays; raises Stale where they are not
            the source's.
        again: whether to make it in any case.

    Returns:
        The result, and the file.

    Raises:
        DataError: a file that it names is missing, or the source changes while it is read; or it can be written
            nowhere.
    """

    def checked(names: dict[str, Facts], more: Any, arrays: Sequence[NDArray[Any]]) -> T:
        if any(map(leads_out, names)):
            raise Stale("it is damaged")
        for name, facts in facts_below(source, names).items():
            if facts != names[name]:
                raise Stale(f"{printable(name or source.name)} has changed since")
        return check(tuple(names), more, list(arrays))

    def existing() -> tuple[T, Path] | str:
        why = ""
        for file in (place for place in places if place.is_file()):
            try:
                return checked(*read(file, form, kinds)), file
            except Stale as error:
                why = why or f"{file}: {error}"
        return why

    if not again and not isinstance(there := existing(), str):
        return there
    with files.locked(places[-1].with_suffix(".lock")) if places[1:] else contextlib.nullcontext():
        if not isinstance(there := "asked for" if again else existing(), str):  # another process has made it
            return there
        made, problems = make(there), []
        try:
            for file in places:
                try:
                    write(file, made)
                    return checked(*read(file, form, kinds)), file
                except OSError as error:
                    problems.append(f"{file}: {error.strerror or error}")
        except Stale as error:
            raise DataError(f"{printable(source)} changes while it is read ({error}): wait until it is whole") from None
        raise DataError(f"the index of {printable(source)} can be written nowhere: {'; '.join(problems)}")
