"""Streams of a process: that on which process 0 writes to the user, and a standard error on which nothing is shown."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from grappe.launch.child import TERMINAL
from grappe.launch.rank import ProcessRank


class UserStream:
    """Stream that drops its text once nobody can read it, as after `| head`, or on a closed terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._open = True
        self.writing = False
        """Whether a write is under way: it may take as long as the terminal is paused."""

    def write(self, text: str) -> int:
        """Writes `text`, if the stream still has a reader."""
        if self._open:
            self.writing = True
            try:
                return self._stream.write(text)
            except OSError:
                self._close()
            finally:
                self.writing = False
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        if self._open:
            self.writing = True
            try:
                self._stream.flush()
            except OSError:
                self._close()
            finally:
                self.writing = False

    def _close(self) -> None:
        self._open = False
        # What its buffer holds would be tried again at the end of the process, and fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def user_stream(process: ProcessRank) -> UserStream | None:
    """Returns process 0's stream to the user, even if its standard output goes to a log; None for other processes."""
    if process.rank != 0:
        return None
    handle = os.environ.pop(TERMINAL, None)
    return UserStream(os.fdopen(int(handle), "w") if handle else sys.stdout)


@contextlib.contextmanager
def without_standard_error() -> Iterator[None]:
    """Context in which nothing that a library writes to the standard error is shown."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
