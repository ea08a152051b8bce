"""Opens files of shards and images for reading at any place, and tells whether a file has changed."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path

from grappe.errors import DataError, reading
from grappe.errors.foreign_text import printable

Facts = tuple[int, int]
"""A file's size, 0 for a folder, and its modification time in nanoseconds."""


def facts_of(file: Path | int) -> Facts:
    """Returns the facts of a file, or of one that is open."""
    status = os.fstat(file) if isinstance(file, int) else file.stat()
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size, status.st_mtime_ns


def leads_out(name: str) -> bool:
    """Returns whether a name from an index would lead out of the folder that it is to be below."""
    return name.startswith("/") or ".." in name.split("/")


def facts_below(source: Path, names: Iterable[str]) -> dict[str, Facts]:
    """Returns the facts of each file below a folder, as they are now; "" is the source itself.

    Raises:
        DataError: one of them is missing.
    """
    facts = {}
    for name in names:
        path = source / name
        try:
            facts[name] = facts_of(path)
        except OSError as error:
            raise DataError(
                f"{printable(path)} is missing ({error.strerror}), which the index names: put it back, or if "
                f"you deleted it on purpose: grappe data index {printable(source)} --again"
            ) from None
    return facts


class OpenFile:
    """A file that threads may read at once; it is closed with the last reference to it.

    Raises:
        DataError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.name = printable(file)
        with reading(self.name):
            self.handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # which a pipe would make wait
        weakref.finalize(self, os.close, self.handle)

    @property
    def facts(self) -> Facts:
        """Returns its facts as they are now."""
        return facts_of(self.handle)

    def read(self, size: int, start: int) -> bytes:
        """Returns `size` bytes from the byte `start` on, fewer at the end."""
        return os.pread(self.handle, size, start)
