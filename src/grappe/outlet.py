"""Outlet: where process 0 talks to the user. A reader who leaves does not end the training."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Any, cast

from grappe.child import TERMINAL
from grappe.place import Place


class Outlet:
    """A stream that goes quiet where another fails: its pipe led into `head`, or its terminal was closed."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._open = True

    def write(self, text: str) -> int:
        """Writes `text`, if anyone still reads."""
        if self._open:
            try:
                return self._stream.write(text)
            except OSError:
                self._close()
        return len(text)

    def flush(self) -> None:
        """Sends what was written."""
        if self._open:
            try:
                self._stream.flush()
            except OSError:
                self._close()

    def _close(self) -> None:
        self._open = False
        # What its buffer holds would be tried again at the end of the process, and fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlet(place: Place) -> IO[str] | None:
    """Process 0's way to the user, though its own output may go to a log; None for the others."""
    if place.rank != 0:
        return None
    handle = os.environ.pop(TERMINAL, None)
    return cast(IO[str], Outlet(os.fdopen(int(handle), "w") if handle else sys.stdout))
