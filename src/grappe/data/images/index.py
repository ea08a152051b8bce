"""Keeps a listing of images, and those that cannot be decoded, in files next to the source or in the user's folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data.images.listing import ENTRY, Index, Kind, Report, listing
from grappe.data.shards import index as index_file
from grappe.data.shards.index import Stale
from grappe.data.shards.open_file import OpenFile, facts_below, leads_out
from grappe.data.shards.selection import LeftOut
from grappe.data.shards.tar import BLOCK, mark_of
from grappe.errors import DataError, reading
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.launch.terminal import complain

_PROBES = 16
MOST_OPEN = 64
"""Archives that a process keeps open: shards may be thousands, and a process may often open 1,024 files."""
_MOST_OFFSET = 1 << 62
INDEX = ".grappe.npy"
QUARANTINE = ".quarantine.txt"
_MOST_QUARANTINE = 1 << 26
_HEAD = "# Images that grappe data check could not decode, and that datasets leave out: name, tab, reason.\n"


LabelFiles = tuple[Path | None, Path | None]
"""The file of labels, and the file that says what numbers in it mean."""


Description = tuple[Kind, tuple[str, ...], LeftOut, tuple[str, ...]]
"""The kind, the classes, what is left out, and hashes of the files of labels."""
_KINDS = (ENTRY, np.dtype("<u8"), np.dtype("u1"))


def described(source: Path, index: Index, labels: LabelFiles) -> index_file.Made:
    """Returns an index as its file has it."""
    description = index.kind, index.classes, index.left_out, tuple(map(_content_hash, labels))
    return facts_below(source, index.files), description, (index.entries, index.name_ends, index.name_bytes)


def _content_hash(file: Path | None) -> str:
    """Hashes a file of labels."""
    if file is None:
        return ""
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


class Reader:
    """Reads images' bytes by their places in the index, from archives or files of their own; notices what has changed.

    Threads may read at once.
    """

    def __init__(self, source: Path, index: Index) -> None:
        self._source, self._index = source, index
        # An archive that the cache drops is closed when its last reader has finished.
        self._archive = functools.lru_cache(MOST_OPEN)(lambda file: OpenFile(source / index.files[file]))

    def read(self, place: int) -> bytes:
        """Returns the content of an image's file.

        Raises:
            DataError: it cannot be read, or is another one than when it was indexed.
        """
        offset, size, mark, file, _ = self._index.entries[place].item()
        if self._index.kind == "folder":
            opened = self._file(place)
            content = opened.read(size, 0)
            same = opened.facts == (size, offset)  # after it was read: it may be written to meanwhile
        else:
            block = self._archive(file).read(BLOCK + size, offset - BLOCK) if BLOCK <= offset < _MOST_OFFSET else b""
            content = block[BLOCK:]
            same = len(content) == size and mark_of(block[:BLOCK]) == mark
        if not same:
            raise self._changed(place)
        return content

    def forget(self, place: int) -> None:
        """Has the system drop an image's bytes from memory, so that the next read is from the disk."""
        offset, size, _, file, _ = self._index.entries[place].item()
        opened, offset = (self._file(place), 0) if self._index.kind == "folder" else (self._archive(file), offset)
        first = offset - offset % mmap.PAGESIZE  # parts of pages would stay
        os.posix_fadvise(opened.handle, first, offset + size - first + mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)

    def name(self, place: int) -> str:
        """The image's name, for messages."""
        return printable(f"{self._source}/{os.fsdecode(self._index.name(place))}")

    def _file(self, place: int) -> OpenFile:
        name = os.fsdecode(self._index.name(place))
        if leads_out(name):
            raise self._changed(place)
        return OpenFile(self._source / name)

    def _changed(self, place: int) -> DataError:
        for file in places(self._source, INDEX):  # opening an index looks at some images only
            with contextlib.suppress(OSError):
                files.remove(file)
        return DataError(
            f"{self.name(place)} changed after it was indexed: a file was replaced. Start again, which makes the "
            f"index again (or: grappe data index {printable(self._source)} --again)"
        )


def places(source: Path, ending: str) -> list[Path]:
    """Lists where a file that belongs to a source may lie, in order of preference."""
    source = source.absolute()
    own = f"{source.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(source))}{ending}"
    return index_file.places(source.with_name(source.name + ending), "images", own)


def open_index(
    source: Path,
    labels: Path | None = None,
    numbering: Path | None = None,
    *,
    again: bool = False,
    report: Report | None = None,
) -> tuple[Index, Path]:
    """Returns a source's index, mapped, and its file; makes the index where it is missing or stale.

    Args:
        again: whether to make it in any case.

    Raises:
        DataError: the source is damaged, missing or has no images.
    """
    label_files = (labels, numbering)

    def make(why: str) -> index_file.Made:
        complain(f"grappe: reading the headers of {source}, once" + (f" ({why})" if why else ""))
        return described(source, listing(source, *label_files, report or (lambda words: None)), label_files)

    def check(names: tuple[str, ...], description: Description, arrays: Sequence[NDArray[Any]]) -> Index:
        (entries, ends, name_bytes), (kind, classes, left_out, hashes) = arrays, description
        if hashes != tuple(map(_content_hash, label_files)):
            raise Stale("the file of labels has changed")
        if not len(entries) == len(ends) > 0 or int(ends[-1]) != len(name_bytes) or (ends[1:] < ends[:-1]).any():
            raise Stale("it is damaged")
        least, most = entries["label"].min(), entries["label"].max()
        if least < 0 or most >= len(classes) or entries["file"].max() >= len(names):
            raise Stale("it is damaged")
        index = Index(
            kind=kind,
            classes=classes,
            files=names,
            entries=entries,
            name_ends=ends,
            name_bytes=name_bytes,
            left_out=left_out,
        )
        reader = Reader(source, index)
        for place in np.linspace(0, len(index) - 1, min(_PROBES, len(index))).astype(int).tolist():
            try:
                reader.read(place)
            except DataError:
                raise Stale(f"{reader.name(place)} has changed since") from None
        return index

    return index_file.kept(source, places(source, INDEX), Description, _KINDS, make, check, again=again)


def quarantined(source: Path, index: Index) -> NDArray[np.int64]:
    """Returns the places of the images that are left out, in order: int64 (n,).

    Raises:
        DataError: the list names images that the source lacks: it belongs to another state of the source.
    """
    file = next((place for place in places(source, QUARANTINE) if place.is_file()), None)
    if file is None:
        return np.empty(0, np.int64)
    with file.open("rb") as stream:
        lines = stream.read(_MOST_QUARANTINE).split(b"\n")
    names = {line.partition(b"\t")[0] for line in lines if line and not line.startswith(b"#")}
    place_of = {name: place for place, name in enumerate(index.names()) if name in names}
    absent = sorted(names - place_of.keys())
    if absent:
        raise DataError(
            f"{file} names '{printable(os.fsdecode(absent[0]))}', which {source} does not have: it belongs to another "
            f"state of it. Make it again: grappe data check {source}"
        )
    return np.array(list(place_of.values()), np.int64)


def write_quarantine(source: Path, index: Index, bad: Mapping[int, str]) -> Path | None:
    """Writes the list of images, place by place with the reason, or removes it where there is none to list.

    Raises:
        DataError: it can be written nowhere.
    """
    lines = (f"{os.fsdecode(index.name(place))}\t{printable(bad[place])}\n" for place in sorted(bad))
    content = os.fsencode(_HEAD + "".join(lines))
    problem = ""
    for file in places(source, QUARANTINE):
        try:
            if bad:
                files.replace(file, content, durable=True)
                return file
            files.remove(file)
        except OSError as error:
            problem = f"{file}: {error.strerror or error}"
    if bad:
        raise DataError(f"the list of what cannot be decoded can be written nowhere: {problem}")
    return None
