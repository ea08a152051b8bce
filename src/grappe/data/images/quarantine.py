"""Keeps the list of a source's images that cannot be decoded, which datasets leave out, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grappe.data.images.index import Index
from grappe.data.images.places import QUARANTINE, places
from grappe.errors import DataError
from grappe.errors.foreign_text import printable
from grappe.launch import files as safe

_MOST = 1 << 26
_HEAD = "# Images that grappe data check could not decode, and that datasets leave out: name, tab, reason.\n"


def quarantined(source: Path, index: Index) -> NDArray[np.int64]:
    """Returns the places of the images that are left out, in order: int64 (n,).

    Raises:
        DataError: the list names what the source does not have: it is that of another state of it.
    """
    file = next((one for one in places(source, QUARANTINE) if one.is_file()), None)
    if file is None:
        return np.empty(0, np.int64)
    content = file.open("rb").read(_MOST)
    lines = [line for line in content.split(b"\n") if line and not line.startswith(b"#")]
    wanted = {line.partition(b"\t")[0] for line in lines}
    found = _places(index, wanted)
    absent = sorted(wanted - found.keys())
    if absent:
        raise DataError(
            f"{file} names '{printable(os.fsdecode(absent[0]))}', which {source} does not have: it belongs to another "
            f"state of it. Make it anew: grappe data check {source}"
        )
    return np.array(sorted(found.values()), np.int64)


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
                safe.replace(file, content, durable=True)
                return file
            safe.remove(file)
        except OSError as error:
            problem = f"{file}: {error.strerror or error}"
    if bad:
        raise DataError(f"the list of what cannot be decoded can be written nowhere: {problem}")
    return None


def _places(index: Index, wanted: set[bytes]) -> dict[bytes, int]:
    """The place of each name that is there; one pass over all names, however many are wanted."""
    found: dict[bytes, int] = {}
    if not wanted:
        return found
    lengths = np.diff(index.name_ends, prepend=np.uint64(0))
    for length in {len(name) for name in wanted}:
        alike = np.flatnonzero(lengths == length)
        starts = (index.name_ends[alike] - np.uint64(length)).astype(np.int64)
        for name in (one for one in wanted if len(one) == length):
            left, left_starts = alike, starts
            # from the end: names begin alike, and each byte rules most of them out
            for back in range(length - 1, -1, -1):
                same = index.name_bytes[left_starts + back] == name[back]
                left, left_starts = left[same], left_starts[same]
            if len(left):
                found[name] = int(left[0])
    return found
