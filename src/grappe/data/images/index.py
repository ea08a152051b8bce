"""Keeps a listing of images as one .npy file, which is mapped into memory and shared by all processes of a node.

The file (`index_file`) has the entries, where each name ends, and the names. It lies next to the source, or in the
user's own folder; so does the list of images that cannot be decoded.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data import index_file
from grappe.data.images.listing import ENTRY, Index, Kind, Report, listing
from grappe.data.images.tar import BLOCK, mark_of
from grappe.data.index_file import Stale
from grappe.errors import DataError, reading
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.launch.files import state_folder
from grappe.launch.terminal import complain

_PROBES = 16
INDEX = ".grappe.npy"
QUARANTINE = ".quarantine.txt"
_MOST_QUARANTINE = 1 << 26
_HEAD = "# Images that grappe data check could not decode, and that datasets leave out: name, tab, reason.\n"


LabelFiles = tuple[Path | None, Path | None]
"""The file of labels, and the file that says what numbers in it mean."""


class _Description(msgspec.Struct, kw_only=True):
    """Describes the arrays of an index, and the state of the source that they are of."""

    kind: Kind
    classes: tuple[str, ...]
    files: tuple[str, ...]
    facts: tuple[tuple[int, int], ...]
    labels: tuple[str, ...]
    left_out: int


_KINDS = (ENTRY, np.dtype("<u8"), np.dtype("u1"))


def described(source: Path, index: Index, labels: LabelFiles) -> index_file.Made:
    """Returns an index as its file has it."""
    description = _Description(
        kind=index.kind,
        classes=index.classes,
        files=index.files,
        facts=tuple(_facts(source, index.files)),
        labels=tuple(map(_content_hash, labels)),
        left_out=index.left_out,
    )
    return description, (index.entries, index.name_ends, index.name_bytes)


def _checked(source: Path, labels: LabelFiles, description: _Description, arrays: list[NDArray[Any]]) -> Index:
    """Checks an index against the source: sizes, modification times, and headers of some members.

    Raises:
        Stale: it is damaged, or belongs to another state of the source.
        DataError: a file that it names is missing: then the source is, and not the index.
    """
    entries, name_ends, name_bytes = arrays
    leads_out = any(name.startswith("/") or ".." in name.split("/") for name in description.files)
    if leads_out or not len(entries) == len(name_ends) > 0 or not len(name_bytes):
        raise Stale("it is damaged")
    index = Index(
        kind=description.kind,
        classes=description.classes,
        files=description.files,
        entries=entries,
        name_ends=name_ends,
        name_bytes=name_bytes,
        left_out=description.left_out,
    )
    if description.labels != tuple(map(_content_hash, labels)):
        raise Stale("the file of labels has changed")
    facts = tuple(_facts(source, index.files))
    for name, earlier, current in zip(index.files, description.facts, facts, strict=False):
        if earlier != current:
            raise Stale(f"{name or source.name} has changed since")
    if len(description.facts) != len(facts):
        raise Stale("it is damaged")
    _check_entries(index, [size for size, _ in facts])
    for place in np.linspace(0, len(index) - 1, min(_PROBES, len(index))).astype(int).tolist():
        _probe(index, source, place)
    return index


def _facts(source: Path, names: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """The size and modification time in nanoseconds of what was listed; a folder's size is taken for 0.

    Raises:
        DataError: one of them is missing.
    """
    for name in names:
        path = source / name
        try:
            facts = path.stat()
        except OSError as error:
            raise DataError(
                f"{path} is missing ({error.strerror}), which the index names: put it back, or if "
                f"you deleted it on purpose: grappe data index {source} --again"
            ) from None
        yield (0 if path.is_dir() else facts.st_size, facts.st_mtime_ns)


def _content_hash(file: Path | None) -> str:
    """Hashes a file of labels."""
    if file is None:
        return ""
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def _check_entries(index: Index, file_sizes: list[int]) -> None:
    """Checks that every entry lies in its file."""
    entries = index.entries
    if int(index.name_ends[-1]) != len(index.name_bytes):
        raise Stale("it is damaged")
    sizes = np.array(file_sizes, np.uint64)
    for start in range(0, len(entries), 1 << 16):
        part = entries[start : start + (1 << 16)]
        ends = index.name_ends[max(start - 1, 0) : start + (1 << 16)]
        wrong = (part["file"] >= len(sizes)).any() or (part["label"] < 0).any()
        if wrong or (part["label"] >= len(index.classes)).any() or (ends[1:] < ends[:-1]).any():
            raise Stale("it is damaged")
        if index.kind != "folder":
            beyond = part["offset"] + part["size"] > sizes[part["file"]]
            if beyond.any() or (part["offset"] < BLOCK).any() or (part["offset"] >> 62).any():
                raise Stale("it is damaged")


def _probe(index: Index, source: Path, place: int) -> None:
    """Checks that an image has not changed."""
    entry = index.entries[place]
    name = os.fsdecode(index.name(place))
    if index.kind == "folder":
        try:
            facts = (source / name).stat()
        except OSError:
            raise Stale(f"{name} is not there any more") from None
        if (facts.st_mtime_ns, facts.st_size) != (int(entry["offset"]), int(entry["size"])):
            raise Stale(f"{name} has changed since")
        return
    with (source / index.files[int(entry["file"])]).open("rb", buffering=0) as stream:
        header = os.pread(stream.fileno(), BLOCK, int(entry["offset"]) - BLOCK)
    if mark_of(header) != int(entry["mark"]):
        raise Stale(f"another member is in the place of {name}")


def places(source: Path, ending: str) -> list[Path]:
    """Lists where a file that belongs to a source may lie, in order of preference."""
    source = source.absolute()
    candidates = [source.with_name(source.name + ending)]
    if (folder := state_folder("images", make=True)) is not None:
        candidates.append(folder / f"{source.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(source))}{ending}")
    return candidates


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

    check = functools.partial(_checked, source, label_files)
    index, file, problems = index_file.kept(
        str(source), places(source, INDEX), _Description, _KINDS, make, check, again=again
    )
    if file is None:
        raise DataError(f"the index of {source} can be written nowhere: {problems}")
    return index, file


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
    place_of = _places_of(index, names)
    absent = sorted(names - place_of.keys())
    if absent:
        raise DataError(
            f"{file} names '{printable(os.fsdecode(absent[0]))}', which {source} does not have: it belongs to another "
            f"state of it. Make it again: grappe data check {source}"
        )
    return np.array(sorted(place_of.values()), np.int64)


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


def _places_of(index: Index, names: set[bytes]) -> dict[bytes, int]:
    """Returns the place of each name that is there, in one pass over all names of the index."""
    places: dict[bytes, int] = {}
    lengths = np.diff(index.name_ends, prepend=np.uint64(0))
    for length in {len(name) for name in names}:
        alike = np.flatnonzero(lengths == length)
        starts = (index.name_ends[alike] - np.uint64(length)).astype(np.int64)
        for name in (name for name in names if len(name) == length):
            left, left_starts = alike, starts
            # from the end: names begin alike, and each byte rules most of them out
            for back in range(length - 1, -1, -1):
                same = index.name_bytes[left_starts + back] == name[back]
                left, left_starts = left[same], left_starts[same]
            if len(left):
                places[name] = int(left[0])
    return places
