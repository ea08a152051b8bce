"""Lists the samples of a folder of tar shards, in WebDataset's form: KEY.jpg beside KEY.cls or KEY.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from grappe.data.images.listing import ENDINGS, ENTRY, THREADS, Found, Listing, Said, joined, opened, text_of
from grappe.data.images.tar import Extent, Member, members
from grappe.errors import DataError
from grappe.errors.foreign_text import printable

CLASSES = "classes.txt"
"""In a folder of shards: the name of each class, a line for each label from 0."""
MANIFEST = "shards.json"
"""In a folder of shards that `grappe data pack` wrote: the shards that there are, with their sizes."""
BEGUN = ".pack.json"
"""In a folder that `grappe data pack` has begun: what is packed into it, and how."""


def shard_names(source: Path) -> tuple[str, ...]:
    """The shards of a folder, in order.

    Raises:
        DataError: one is missing: by the folder's manifest, or by a gap in their numbers.
    """
    there = shards_in(source)
    if (source / MANIFEST).is_file():
        sizes = _manifest(source)
        absent = sorted(sizes.keys() - set(there))
        for name in there:
            if name in sizes and (source / name).stat().st_size != sizes[name]:
                raise DataError(f"{source / name} has another size than {MANIFEST} says: copy it again")
    elif (source / BEGUN).is_file():
        raise DataError(f"{source} is not packed to its end: start grappe data pack again, and it goes on")
    else:
        absent = list(_gaps(there))
    if absent:
        more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise DataError(
            f"{source} lacks the shard {printable(absent[0])}{more}: copy it here too; without it this "
            "process would have fewer samples than others"
        )
    return tuple(there)


def _manifest(source: Path) -> dict[str, int]:
    """The size of each shard, by its name."""
    try:
        found = json.loads((source / MANIFEST).read_bytes())["shards"]
        return {str(one["name"]): int(one["bytes"]) for one in found}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(f"{source / MANIFEST} is damaged: pack the shards anew") from None


def shards_in(source: Path) -> list[str]:
    """The names of the shards in a folder."""
    try:
        return sorted(one.name for one in source.glob("*.tar") if one.is_file())
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror or error}") from None


def _gaps(names: Sequence[str]) -> Iterator[str]:
    """The names that are missing between numbered ones: shard-000001.tar between shard-000000.tar and -000002."""
    numbered: dict[tuple[str, int], list[int]] = {}
    for name in names:
        if found := re.fullmatch(r"(.*?)([0-9]+)\.tar", name):
            numbered.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    for (prefix, width), numbers in numbered.items():
        if min(numbers) < 2:  # else they may be years
            for number in sorted(set(range(min(numbers), max(numbers))) - set(numbers)):
                yield f"{prefix}{number:0{width}d}.tar"


def sharded_listing(source: Path, said: Said) -> Listing:
    """Lists a folder of shards: files whose names are alike up to the first dot are one sample.

    Raises:
        DataError: a shard is missing or damaged, or a sample has no label.
    """
    shards = shard_names(source)
    parts: list[Found] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for number, part in enumerate(threads.map(lambda name: _shard(source, name), shards)):
            part.entries["file"] = number
            parts.append(part)
            said(f"{len(parts):,} of {len(shards):,} shards")
    most = max((int(part.entries["label"].max()) for part in parts if part.names), default=0)
    names = source / CLASSES
    classes = (
        names.read_text(errors="replace").splitlines() if names.is_file() else list(map(str, range(most + 1)))
    )
    if len(classes) <= most:
        raise DataError(f"{names} has {len(classes)} classes, and a sample has the label {most}")
    return joined("shards", shards, classes, parts)


def _shard(source: Path, name: str) -> Found:
    names, rows, left_out = [], [], 0
    with opened(source / name) as archive:
        for key, parts in _samples(members(archive)):
            image = next((one for ending, one in parts.items() if b"." + ending in ENDINGS), None)
            if image is None:
                left_out += 1
                continue
            names.append(os.fsencode(name) + b"/" + image.name.removeprefix(b"./"))
            rows.append((image.offset, image.size, image.mark, 0, _label(archive, key, parts)))
    return Found(names, np.array(rows, ENTRY), left_out)


def _samples(found: Iterator[Member]) -> Iterator[tuple[bytes, dict[bytes, Member]]]:
    key, parts = b"", {}
    for one in found:
        folder, slash, name = one.name.rpartition(b"/")
        stem, _, ending = name.partition(b".")
        if folder + slash + stem != key and parts:
            yield key, parts
            parts = {}
        key = folder + slash + stem
        parts[ending.lower()] = one
    if parts:
        yield key, parts


def _label(archive: Extent, key: bytes, parts: dict[bytes, Member]) -> int:
    found: object = None
    if b"cls" in parts:
        text = parts[b"cls"].head.strip()
        found = int(text) if text.isdigit() and len(text) < 10 else text.decode(errors="replace")
    elif b"json" in parts:
        one = parts[b"json"]
        try:
            told = json.loads(os.pread(archive.handle, min(one.size, 1 << 20), one.offset))
            found = next((told[name] for name in ("label", "cls", "class") if name in told), None)
        except (ValueError, TypeError, RecursionError):
            found = None
    if type(found) is not int or not 0 <= found < 1 << 31:
        raise DataError(
            f"{archive.title}: the sample '{printable(text_of(key))}' has no label that is a whole number: KEY.cls, or "
            f'"label" in KEY.json'
        )
    return found
