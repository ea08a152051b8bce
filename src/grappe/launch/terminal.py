"""Writes lines to the user, whose terminal shows and never obeys them; process 0's stream to the user."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import IO, Any

from grappe.errors.foreign_text import printable, printable_lines
from grappe.language import translated, translated_line
from grappe.launch.rank import ProcessRank
from grappe.words import count_of

CLEAR = "\r\033[K"
NARROWEST = 20  # columns of a terminal
TERMINAL = "GRAPPE_TERMINAL"  # the variable with process 0's way to the user, and the user's language


def say(text: object, stream: IO[str] | UserStream | None = None, *, end: str = "\n") -> None:
    """Writes lines of text to `stream`, the standard output by default, each in the user's language."""
    stream = sys.stdout if stream is None else stream
    write(wrapped("\n".join(translated_line(line, stream) for line in str(text).split("\n")), stream), stream, end=end)


def write(text: object, stream: IO[str] | UserStream | None = None, *, end: str = "\n") -> None:
    """Writes lines of text that have one language: JSON, scripts, what others wrote."""
    stream = sys.stdout if stream is None else stream
    clear(stream)
    stream.write(f"{printable_lines(text)}{end}")
    stream.flush()


def complain(text: object, stream: IO[str] | UserStream | None = None) -> None:
    """Writes lines of text to the standard error, or another stream, in the user's language."""
    stream = sys.stderr if stream is None else stream
    write(wrapped(translated(text, stream), stream), stream)


def wrapped(text: object, stream: IO[str] | UserStream, indent: int = 0) -> str:
    """Breaks lines between words at a terminal's width; elsewhere, and in a longer word, lines stay whole.

    Args:
        indent: columns before each further line.
    """
    if not stream.isatty():
        return str(text)
    columns = 0
    with contextlib.suppress(OSError):  # it says that it is a terminal, and is none
        columns = os.get_terminal_size(stream.fileno()).columns
    width = max(NARROWEST + indent, columns or shutil.get_terminal_size().columns)
    fill = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    lines = str(text).split("\n")
    return "\n".join(fill.fill(line) if len(line) > width else line for line in lines)


def progress(words: str) -> None:
    """Writes a line on standard error, in the user's language; on a terminal over the previous line."""
    if sys.stderr.isatty():
        waiting(words)
    elif words:  # a log: half a minute of silence looks like a hang
        sys.stderr.write(f"{printable(translated(words, sys.stderr))}\n")
        sys.stderr.flush()


def waiting(words: str) -> None:
    """Shows on a terminal what is waited for, in the user's language, until the next line is written; "" ends it."""
    if sys.stderr.isatty():
        text = printable(translated(words, sys.stderr))
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0: unknown. CLEAR clears a single line
        sys.stderr.write(CLEAR + (text if len(text) < width else f"{text[: width - 2]}…"))
        sys.stderr.flush()


def starting(processes: int) -> None:
    """Shows that processes are being started, where the user's terminal has the results too."""
    if sys.stdout.isatty():
        waiting(f"starting {count_of(processes, 'process')} …")


def clear(stream: IO[str] | UserStream) -> None:
    """Clears the line that `waiting` has left on a terminal, maybe in another process."""
    if stream.isatty():
        stream.write(CLEAR)


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


class UserStream:
    """Stream that drops its text once nobody can read it, as after `| head`, or on a closed terminal."""

    def __init__(self, stream: IO[str], language: str | None = None) -> None:
        self._stream = stream
        self.language = language
        """The user's language, where this process has another one; None: it has the same."""
        self.errors = 2
        """The descriptor of the user's standard error, to which nothing is written here."""
        self._open = True
        self.writing = False
        """Whether a write is under way: it may take as long as the terminal is paused."""

    def write(self, text: str) -> int:
        """Writes `text`, if the stream still has a reader."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if not self._open:
            return
        self.writing = True
        try:
            action()
        except OSError:
            self._open = False
            # What its buffer holds would be tried again at the end of the process, and fail again.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        finally:
            self.writing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def user_stream(process: ProcessRank) -> UserStream | None:
    """Returns process 0's stream to the user, even if its standard output goes to a log; None for other processes."""
    if process.rank != 0:
        return None
    handles, _, language = os.environ.pop(TERMINAL, "").partition(" ")
    handle, _, errors = handles.partition(",")
    opened = os.fdopen(int(handle), "w", errors="backslashreplace") if handle else sys.stdout
    stream = UserStream(opened, language or None)
    stream.errors = int(errors or 2)
    return stream


@contextlib.contextmanager
def redirected(*descriptors: int, to: int | None = None) -> Iterator[None]:
    """Context in which what is written to `descriptors`, by libraries and new processes too, goes to another.

    Args:
        descriptors: of the standard output (1) and the standard error (2).
        to: the other one; None: nothing is shown.
    """
    target = os.open(os.devnull, os.O_WRONLY) if to is None else to
    streams = [stream for descriptor in descriptors if (stream := {1: sys.stdout, 2: sys.stderr}[descriptor])]
    for stream in streams:
        stream.flush()
    kept = [os.dup(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.dup2(target, descriptor)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        for descriptor, before in zip(descriptors, kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        if to is None:
            os.close(target)
