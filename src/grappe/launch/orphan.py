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

F_SETSIG = 10  # of Linux; Python's fcntl has no name for it

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ends this process, which multiprocessing has started, with the process that started it, however that came."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_writer(parent.sentinel)

    def watch() -> None:  # where the kernel has no such signal
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_with_writer(pipe: int) -> None:
    """Has the kernel kill this process once nobody holds the other end of `pipe`, or ends it now if so already.

    Nothing may be written into the pipe any more: that would kill, too.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import fcntl

        if sys.platform == "linux":
            fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(pipe, F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    waiting = select.poll()
    waiting.register(pipe, 0)  # of a hang-up it tells unasked
    if any(event & select.POLLHUP for _, event in waiting.poll(0)):
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_forking_parent(parent: int) -> None:
    """Ends this process, made by os.fork, with its `parent`: the process id that the parent had before the fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
