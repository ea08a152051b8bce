"""Defines Listing: the images of a source in the order of their ids, and how a listing is put together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grappe.data.images.tar import Extent, Member
from grappe.errors import DataError
from grappe.errors.foreign_text import printable

Kind = Literal["folder", "archive", "shards"]
Said = Callable[[str], None]
"""Told what is going on, in a few words."""
ENDINGS = (b".jpg", b".jpeg", b".png")
THREADS = 8  # they wait for a file system
LARGEST = (1 << 32) - 1
ENTRY = np.dtype([("offset", "<u8"), ("size", "<u4"), ("mark", "<u4"), ("file", "<u4"), ("label", "<i4")])
"""An image: where it begins in which archive, and its header's mark; of a file of its own `offset` is the mtime."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a source, in the order of their ids."""

    kind: Kind
    files: tuple[str, ...]
    """Archives below the source, or its class folders; "" is the source itself."""
    classes: tuple[str, ...]
    entries: NDArray[np.void]
    names: list[bytes]
    left_out: int
    """Files whose names are not those of images."""


class Found(NamedTuple):
    """The images of one class folder, or of one archive."""

    names: list[bytes]
    entries: NDArray[np.void]
    left_out: int


@contextmanager
def opened(file: Path) -> Iterator[Extent]:
    """Opens an archive for walking its headers.

    Raises:
        DataError: it cannot be read.
    """
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(file.open("rb", buffering=0))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
        handle = stream.fileno()
        yield Extent(handle, printable(file), 0, os.fstat(handle).st_size)


def rows_of(found: Sequence[Member]) -> NDArray[np.void]:
    """Returns the entries of an archive's members, without labels."""
    too_large = next((one for one in found if one.size > LARGEST), None)
    if too_large is not None:
        raise DataError(f"'{printable(text_of(too_large.name))}' is no image: {too_large.size:,} bytes")
    return np.array([(one.offset, one.size, one.mark, 0, 0) for one in found], ENTRY)


def in_order(names: list[bytes], entries: NDArray[np.void], left_out: int) -> Found:
    """Sorts images by name."""
    order = sorted(range(len(names)), key=names.__getitem__)
    return Found([names[place] for place in order], entries[order], left_out)


def joined(
    kind: Kind, files: Sequence[str], classes: Sequence[str], parts: Sequence[Found], left_out: int = 0
) -> Listing:
    """Puts the images of several folders or archives together, in this order."""
    return Listing(
        kind=kind,
        files=tuple(files),
        classes=tuple(classes),
        entries=np.concatenate([part.entries for part in parts]),
        names=[name for part in parts for name in part.names],
        left_out=left_out + sum(part.left_out for part in parts),
    )


def labelled(
    kind: Kind, files: Sequence[str], classes: Sequence[str], parts: Sequence[Found], left_out: int = 0
) -> Listing:
    """Does the same as `joined` where each part is a class: its place is its images' label."""
    for label, part in enumerate(parts):
        part.entries["label"] = label
    return joined(kind, files, classes, parts, left_out)


def is_image(name: bytes) -> bool:
    """Tells by its name whether a file is an image."""
    base = name.rpartition(b"/")[2]
    return base.lower().endswith(ENDINGS) and not base.startswith(b".")  # ._NAME.jpg: what macOS adds


def text_of(name: bytes) -> str:
    """Decodes a name; bytes that are no UTF-8 are shown as �."""
    return name.decode(errors="replace")
