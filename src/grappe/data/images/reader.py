"""Reads an image's bytes: by one pread from an archive, or from a file of its own; and notices what has changed."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

from grappe.data.images.index import Index
from grappe.data.images.tar import BLOCK, mark_of
from grappe.errors import DataError
from grappe.errors.foreign_text import printable

MOST_OPEN = 64
"""Archives that a process keeps open: shards may be thousands, and a process may often open 1,024 files."""


class Reader:
    """The bytes of a source's images, by their places in its index; threads may read at once."""

    def __init__(self, source: Path, index: Index) -> None:
        self._source, self._index = source, index
        self._opened: OrderedDict[int, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, place: int) -> bytes:
        """Returns the content of an image's file.

        Raises:
            DataError: it cannot be read, or is another one than when it was indexed.
        """
        offset, size, mark, file, _ = self._index.entries[place].item()
        if self._index.kind == "folder":
            return self._own_file(place, size, offset)
        handle = self._handle(file)  # held until it is read from: another thread may open one too many
        content = os.pread(handle.number, BLOCK + size, offset - BLOCK)
        if len(content) != BLOCK + size or mark_of(content[:BLOCK]) != mark:
            raise self._changed(place)
        return content[BLOCK:]

    def forget(self, place: int) -> None:
        """Has the system drop an image's bytes from memory: the next read is the disk's. Changes nothing else."""
        offset, size, _, file, _ = self._index.entries[place].item()
        if self._index.kind == "folder":
            handle, offset = _Handle(self._source / os.fsdecode(self._index.name(place))), 0
        else:
            handle = self._handle(file)
        first = offset - offset % mmap.PAGESIZE  # parts of pages would stay
        os.posix_fadvise(handle.number, first, offset + size - first + mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)

    def name(self, place: int) -> str:
        """The image's name, for messages."""
        return printable(f"{self._source}/{os.fsdecode(self._index.name(place))}")

    def _own_file(self, place: int, size: int, mtime: int) -> bytes:
        name = os.fsdecode(self._index.name(place))
        if name.startswith("/") or ".." in name.split("/"):
            raise self._changed(place)
        try:
            handle = os.open(self._source / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise DataError(f"{self.name(place)} cannot be read: {error.strerror}") from None
        try:
            found = os.fstat(handle)
            if (found.st_size, found.st_mtime_ns) != (size, mtime):
                raise self._changed(place)
            return os.pread(handle, size, 0)
        finally:
            os.close(handle)

    def _handle(self, file: int) -> _Handle:
        with self._lock:
            handle = self._opened.get(file)
            if handle is None:
                name = self._index.files[file]
                handle = self._opened[file] = _Handle(self._source / name if name else self._source)
                if len(self._opened) > MOST_OPEN:
                    self._opened.popitem(last=False)  # closed once no thread reads from it
            else:
                self._opened.move_to_end(file)
            return handle

    def _changed(self, place: int) -> DataError:
        return DataError(
            f"{self.name(place)} is not what it was when it was indexed: a file was replaced meanwhile. Start again, "
            f"and the index is made anew (or: grappe data index {printable(self._source)} --again)"
        )


class _Handle:
    """An open archive; closed with the last reference to it."""

    def __init__(self, file: Path) -> None:
        self.number = -1
        try:
            self.number = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{printable(file)} cannot be read: {error.strerror}") from None

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
