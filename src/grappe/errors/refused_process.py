"""Refused processes and threads: says so in one line, where the system has given a user as many as it may."""

from __future__ import annotations

import errno
import resource

THREADS = ("can't start new thread", "Resource temporarily unavailable")
"""Python's words, and those of C++ libraries: gloo's."""


def refused_process(error: BaseException) -> str | None:
    """One line where `error` means that the system starts no further process or thread; else None."""
    # An EAGAIN about a file, or from a pipe that is full, is something else: the first has a name.
    forked = isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN and error.filename is None
    threaded = isinstance(error, RuntimeError) and any(words in str(error) for words in THREADS)
    if not forked and not threaded:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    most = "as many as the system has" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        "the system starts no further process or thread: this user may have "
        f"{most} (ulimit -u), those of other programs included, and each needs memory (ulimit -v): end other "
        "programs, raise the limit, or use a plan of fewer processes with threads=1,workers=0"
    )
