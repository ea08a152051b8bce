"""Writes lines to the user: what comes this way can be shown by any terminal, and is never obeyed by one."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Protocol

from grappe.errors.foreign_text import printable, printable_lines
from grappe.language import translated


class TextStream(Protocol):
    """A text stream."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def say(text: object, stream: TextStream | None = None, *, end: str = "\n") -> None:
    """Writes lines of text to `stream`, the standard output by default."""
    stream = sys.stdout if stream is None else stream
    stream.write(f"{printable_lines(text)}{end}")
    stream.flush()


def complain(text: object) -> None:
    """Writes lines of text to the standard error, in the user's language."""
    say(translated(text, sys.stderr), sys.stderr)


def progress(words: str) -> None:
    """Writes a line on standard error, in the user's language; on a terminal over the previous line."""
    words = str(translated(words, sys.stderr))
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{printable(words)}")
    elif words:  # a log: half a minute of silence looks like a hang
        sys.stderr.write(f"{printable(words)}\n")
    sys.stderr.flush()


def show_any_text() -> None:
    """Lets the standard streams take any text: a letter that the locale's encoding lacks is written as its escape.

    One that who started this process has closed takes it as /dev/null does.
    """
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")
