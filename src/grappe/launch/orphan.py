"""Ends a process when the one that started it has ended: by the kernel, so that no work goes on meanwhile.

On a machine that is loaded forty times over, a thread that watches the parent gets its turn seconds later, and not at
all while another library keeps the interpreter. The kernel needs no turn: it kills stopped processes, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator

F_SETSIG = 10  # of Linux; Python's fcntl has no name for it

PR_SET_PDEATHSIG = 1

PIPE = "GRAPPE_PARENT_PIPE"
"""The process id of the process that starts the fork server, and its descriptor of a pipe: "1234:5"."""

_pipes: dict[int, tuple[int, int]] = {}  # by process id: a forked child does not hold its parent's


@contextlib.contextmanager
def parent_pipe_in_environment() -> Iterator[None]:
    """Context in which a started process learns of a pipe that this process alone writes to: see end_with_starter.

    Multiprocessing's own pipe does not serve: with each process that is to be forked its writing end is sent to the
    server, and while the server imports, it lies unread in the socket and keeps the pipe open.
    """
    pid = os.getpid()
    if pid not in _pipes:
        _pipes[pid] = os.pipe()
    os.environ[PIPE] = f"{pid}:{_pipes[pid][0]}"
    try:
        yield
    finally:
        os.environ.pop(PIPE, None)


def end_with_starter() -> None:
    """Ends this process with the process that started it within parent_pipe_in_environment; else does nothing."""
    pid, _, descriptor = os.environ.pop(PIPE, "").partition(":")
    if not pid:
        return
    if os.getppid() != int(pid):  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(OSError):  # no /proc: the server ends on its own, after its imports
        end_with_writer(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK))


def end_with_parent() -> None:
    """Ends this process, which multiprocessing has started, with the process that started it, however that came."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if end_with_writer(parent.sentinel):
        return

    def watch() -> None:  # where the kernel has no such signal
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_with_writer(pipe: int) -> bool:
    """Has the kernel kill this process once nobody holds the other end of `pipe`; ends it now if nobody does.

    Returns whether the kernel will.

    Nothing may be written into the pipe any more: that would kill, too.
    """
    asked = False
    with contextlib.suppress(ImportError, OSError, ValueError):
        import fcntl

        if sys.platform == "linux":
            fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(pipe, F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
            asked = True
    waiting = select.poll()
    waiting.register(pipe, 0)  # of a hang-up it tells unasked
    if any(event & select.POLLHUP for _, event in waiting.poll(0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return asked


def end_with_launcher() -> None:
    """Ends this process with torchrun's agent, which has started it; else it would train on, or wait for ever."""
    if sys.platform == "linux":  # the agent starts processes in its main thread, whose end the kernel tells
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_forking_parent(parent: int) -> None:
    """Ends this process, made by os.fork, with its `parent`: the process id that the parent had before the fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
