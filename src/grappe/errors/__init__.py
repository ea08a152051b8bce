"""Defines every error that grappe raises on purpose, and the exit codes of the command line.

GrappeError                 a request cannot be carried out; the message says what to do instead
├── UsageError              the command line, a plan or a field is wrong
│   ├── TaskError           a task cannot be found, loaded, or breaks its contract
│   ├── PlanError           a plan is malformed, or this world or engine cannot honour it
│   └── RunError            a run's folder is missing, damaged, or belongs to something else
├── DataError               a data file is missing, truncated or hostile
│   └── DataNotFound        it is missing
├── DivergedError           the loss is not a number any more
├── ComputedWrongly         a process's gradients are not those of the same samples and weights on others
├── OutOfMemory             a process may not take as much memory as the plan needs
├── Idle                    the processes computed nothing for as long as --idle allows
└── ProcessDied             one of the processes ended unexpectedly
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: saved before the end, start again to go on
TRACEBACK = "GRAPPE_TRACEBACK"
"""Variable with which a notebook shows the whole traceback of grappe's errors."""
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_IS_GONE = (errno.EROFS, errno.EIO)


class GrappeError(Exception):
    """Error for the user: a request cannot be carried out. `str(error)` is the whole message."""

    exit_code = EXIT_USAGE
    by = ""
    """The process that raised the error, if a launcher started several."""
    details = ""
    """The traceback, if another process raised the error."""
    nodes: Mapping[str, str] = {}
    """The nodes that may have computed wrongly, with the evidence; "proven: ..." of the one that has."""
    _was_shown = False

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows: the user's line and the message; the whole traceback from the second time on."""
        from grappe.errors.foreign_text import printable, printable_lines
        from grappe.errors.user_line import line_of

        if self._was_shown or os.environ.get(TRACEBACK):  # the second time is %tb
            return [printable_lines(text) for text in (self.details, *traceback.format_exception(self)) if text]
        self._was_shown = True
        line = line_of(self)
        where = [] if line is None else [printable(f"line {line.number}{line.text and ': '}{line.text}")]
        hint = "%tb shows the whole traceback"
        return [*where, printable_lines(f"{type(self).__name__}: {self}"), hint]


class UsageError(GrappeError):
    """The command line, a plan or a field is wrong."""


class TaskError(UsageError):
    """A task cannot be found, loaded, or breaks its contract."""


class PlanError(UsageError):
    """A plan is malformed, or this world or engine cannot honour it."""


class RunError(UsageError):
    """A run's folder is missing, damaged, or belongs to something else."""


class ReplayError(RunError):
    """A script fails on its way back to its checkpoint; the next start brings it back in another way."""


class DataError(GrappeError):
    """A data file is missing, truncated or hostile."""


class DataNotFound(DataError):
    """A data file is missing."""


class DivergedError(GrappeError):
    """The loss is not a number any more; the saved checkpoints are unchanged."""


class ComputedWrongly(GrappeError):
    """A process's gradients are not those of the same samples and weights on others; what was saved is intact."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, message: str, nodes: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.nodes = (
            {node: "proven: " * (len(nodes) == 1) + evidence for node, evidence in nodes.items()} if nodes else {}
        )


class OutOfMemory(GrappeError):
    """A process may not take as much memory as the plan needs."""


class Idle(GrappeError):
    """The processes computed nothing for as long as --idle allows."""

    exit_code = EXIT_INTERRUPTED


class ProcessDied(GrappeError):
    """One of the processes ended unexpectedly."""

    exit_code = EXIT_FAILURE
    killed = False
    """Whether it was SIGKILL, which comes from outside: what was saved can be gone on with."""


def of_file(error: OSError) -> UsageError:
    """The message of an error about a file: which file, and what is wrong with it."""
    return UsageError(f"{error.filename}: {error.strerror}" if error.filename else str(error))


@contextlib.contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Context in which the system's refusal to read a file of data is a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def refuse_pointer(name: str, content: bytes) -> None:
    """Raises DataError where Git has left the pointer of a file that Git LFS has not fetched."""
    if content.startswith(b"version https://git-lfs"):
        raise DataError(f"{name} is a pointer of Git LFS, and not the file: fetch it by git lfs pull")


def is_of_disk(error: OSError) -> bool:
    """Returns whether the error means a full or read-only disk."""
    return error.errno in DISK_IS_FULL + DISK_IS_GONE


def disk_advice(error: OSError) -> str:
    """Returns what to do about a disk that refuses to be written."""
    if error.errno in DISK_IS_FULL:
        return "free some space, or take another disk"
    if error.errno in DISK_IS_GONE:
        return "that disk takes nothing now: ask for it, or take another"
    return "look at the permissions there, or take another folder"


def nearest(wrong: str, right: Iterable[str]) -> str:
    """Returns the hint for a mistyped name: the most similar names, or all names."""
    names = sorted(right)
    close = difflib.get_close_matches(wrong, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there is: {', '.join(names)}" if names else "there is none"
