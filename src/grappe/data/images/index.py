"""Keeps a listing of images as one .npy file, which is mapped into memory and shared by all processes of a node.

The file is a one-dimensional array of bytes: a hash of all that follows, the length of a JSON description, the
description, then at multiples of 64 bytes the entries, where each name ends, and the names. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data.images.listing import ENTRY, Kind, Listing
from grappe.data.images.tar import BLOCK, mark_of
from grappe.errors import DataError
from grappe.launch import files as safe

VERSION = 1
_ALIGNED = 64
_NPY_HEADER = 128
_START = 16
_PROBES = 16
_MOST_DESCRIPTION = 1 << 28


LabelFiles = tuple[Path | None, Path | None]
"""The file of labels, and the file that says what numbers in it mean."""


class Stale(Exception):
    """An index is not that of the source as it is now; `str(error)` says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """The images of a source, N of them, in the order of their ids."""

    kind: Kind
    classes: tuple[str, ...]
    files: tuple[str, ...]
    """Archives below the source, or class folders; "" is the source itself."""
    entries: NDArray[np.void]
    """[N] of `ENTRY`, mapped."""
    name_ends: NDArray[np.uint64]
    """[N]: where each name ends in `name_bytes`."""
    name_bytes: NDArray[np.uint8]
    left_out: int

    def __len__(self) -> int:
        return len(self.entries)

    def name(self, place: int) -> bytes:
        """The name of an image below the source: CLASS/NAME.jpg, or SHARD.tar/KEY.jpg."""
        start = int(self.name_ends[place - 1]) if place else 0
        return self.name_bytes[start : int(self.name_ends[place])].tobytes()


def write(file: Path, source: Path, listed: Listing, labels: LabelFiles) -> None:
    """Writes an index in one step, so that nobody ever reads half of it.

    Raises:
        OSError: it cannot be written there.
    """
    names = b"".join(listed.names)
    ends = np.cumsum(np.fromiter(map(len, listed.names), np.uint64, len(listed.names)), dtype=np.uint64)
    description = {
        "version": VERSION,
        "kind": listed.kind,
        "classes": listed.classes,
        "files": listed.files,
        "facts": list(facts(source, listed.files)),
        "labels": [content_hash(one) for one in labels],
        "images": len(listed.entries),
        "name bytes": len(names),
        "left out": listed.left_out,
    }
    text = json.dumps(description).encode()
    content = io.BytesIO()
    np.save(
        content, np.frombuffer(_laid_out(text, listed.entries, ends, names), np.uint8), allow_pickle=False
    )
    safe.replace(file, content.getvalue(), durable=True)


def read(file: Path, source: Path, labels: LabelFiles) -> Index:
    """Maps an index, and checks it against the source: sizes, modification times, and headers of some members.

    Raises:
        Stale: it is damaged, or that of another state of the source.
        DataError: a file that it names is missing: then the source is, and not the index.
    """
    raw = _bytes_of(file)
    told, start = _description(raw)
    try:
        found = _mapped(raw, told, start)
        was, hashes = [tuple(one) for one in told["facts"]], told["labels"]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Stale("it is damaged") from None
    if hashes != [content_hash(one) for one in labels]:
        raise Stale("the file of labels is another one")
    now = list(facts(source, found.files))
    for name, before, after in zip(found.files, was, now, strict=False):
        if before != after:
            raise Stale(f"{name or source.name} has changed since")
    if len(was) != len(now):
        raise Stale("it is damaged")
    _check(found, source, now)
    return found


def _bytes_of(file: Path) -> NDArray[np.uint8]:
    """Maps the array of a .npy file, whose header can only be that of an array of bytes."""
    try:
        length = file.stat().st_size - _NPY_HEADER
        with file.open("rb") as stream:
            header = stream.read(_NPY_HEADER)
        if length < _START or header != _npy_header(length):
            raise Stale("it is another file, or cut off")
        return np.memmap(file, np.uint8, "r", _NPY_HEADER)
    except (OSError, ValueError) as error:
        raise Stale(f"it cannot be read: {error}") from None


def _npy_header(length: int) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (length,)})
    return stream.getvalue()


def facts(source: Path, names: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """The size and modification time in nanoseconds of what was listed; a folder's size is taken for 0.

    Raises:
        DataError: one of them is missing.
    """
    for name in names:
        path = source / name if name else source
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(
                f"{path} is missing ({error.strerror}), which the index names: put it back; or, where it is meant to "
                f"be gone: grappe data index {source} --again"
            ) from None
        yield (0 if path.is_dir() else found.st_size, found.st_mtime_ns)


def content_hash(file: Path | None) -> str:
    """Hashes a file of labels."""
    if file is None:
        return ""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def _laid_out(text: bytes, *sections: Any) -> bytearray:
    """The content of the array."""
    laid = bytearray(bytes(8) + len(text).to_bytes(8, "little") + text)
    for section in sections:
        laid += bytes(-len(laid) % _ALIGNED)
        laid += section if isinstance(section, bytes) else section.tobytes()
    laid[:8] = xxhash.xxh3_64_digest(memoryview(laid)[8:])
    return laid


def _description(raw: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(raw[8:_START].tobytes(), "little")
    if xxhash.xxh3_64_digest(raw[8:].data) != raw[:8].tobytes() or length > min(len(raw), _MOST_DESCRIPTION):
        raise Stale("it is damaged")
    try:
        told = json.loads(raw[_START : _START + length].tobytes())
    except (ValueError, RecursionError):
        raise Stale("it is damaged") from None
    if not isinstance(told, dict) or told.get("version") != VERSION:
        raise Stale("another version of grappe wrote it")
    return told, _START + length


def _mapped(raw: NDArray[np.uint8], told: dict[str, Any], start: int) -> Index:
    count, length = int(told["images"]), int(told["name bytes"])
    parts = []
    for size in (count * ENTRY.itemsize, count * 8, length):
        start += -start % _ALIGNED
        part = raw[start : start + size]
        if size < 0 or len(part) != size:
            raise ValueError("a section is cut off")
        parts.append(part)
        start += size
    classes, names = told["classes"], told["files"]
    if not all(isinstance(one, str) for one in [*classes, *names]) or told["kind"] not in get_args(Kind):
        raise ValueError("names are no text")
    if any(name.startswith("/") or ".." in name.split("/") for name in names):
        raise ValueError("a name leads out of the source")
    return Index(
        kind=told["kind"],
        classes=tuple(classes),
        files=tuple(names),
        entries=np.asarray(parts[0]).view(ENTRY),
        name_ends=np.asarray(parts[1]).view("<u8"),
        name_bytes=np.asarray(parts[2]),
        left_out=int(told["left out"]),
    )


def _check(found: Index, source: Path, now: list[tuple[int, int]]) -> None:
    """Checks that every entry lies in its file, and that some of them are what they were."""
    entries = found.entries
    if not len(entries) or int(found.name_ends[-1]) != len(found.name_bytes):
        raise Stale("it is damaged")
    sizes = np.array([size for size, _ in now], np.uint64)
    for start in range(0, len(entries), 1 << 16):
        part = entries[start : start + (1 << 16)]
        ends = found.name_ends[max(start - 1, 0) : start + (1 << 16)]
        wrong = (part["file"] >= len(sizes)).any() or (part["label"] < 0).any()
        if wrong or (part["label"] >= len(found.classes)).any() or (ends[1:] < ends[:-1]).any():
            raise Stale("it is damaged")
        if found.kind != "folder":
            beyond = part["offset"] + part["size"] > sizes[part["file"]]
            if beyond.any() or (part["offset"] < BLOCK).any() or (part["offset"] >> 62).any():
                raise Stale("it is damaged")
    for place in np.linspace(0, len(entries) - 1, min(_PROBES, len(entries))).astype(int).tolist():
        _probe(found, source, place)


def _probe(found: Index, source: Path, place: int) -> None:
    entry = found.entries[place]
    name = os.fsdecode(found.name(place))
    if found.kind == "folder":
        try:
            facts_now = (source / name).stat()
        except OSError:
            raise Stale(f"{name} is not there any more") from None
        if (facts_now.st_mtime_ns, facts_now.st_size) != (int(entry["offset"]), int(entry["size"])):
            raise Stale(f"{name} has changed since")
        return
    file = found.files[int(entry["file"])]
    with (source / file if file else source).open("rb", buffering=0) as stream:
        header = os.pread(stream.fileno(), BLOCK, int(entry["offset"]) - BLOCK)
    if mark_of(header) != int(entry["mark"]):
        raise Stale(f"another member is in the place of {name}")
