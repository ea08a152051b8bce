"""Private names of Python's multiprocessing."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from multiprocessing import forkserver, popen_fork, queues
from multiprocessing.context import ForkContext, ForkProcess

from grappe.private_api import PrivateName

SEEN = "Python 3.11"

USED = (
    PrivateName("multiprocessing.forkserver", "_forkserver", SEEN),
    PrivateName("multiprocessing.forkserver.ForkServer", "_forkserver_pid", SEEN),
    PrivateName("atexit", "_run_exitfuncs", SEEN),
    PrivateName("multiprocessing.queues.Queue", "_on_queue_feeder_error", SEEN),
    PrivateName("multiprocessing.context.ForkProcess", "_Popen", SEEN),
)
PATIENCE_SECONDS = 3.0


def forkserver_is_running() -> bool:
    """Returns whether this process has started the fork server; ensure_running() starts it."""
    return _pid() is not None


def start_as_python_does() -> None:
    """Lets a process of the fork server start others as a program of its own would: a DataLoader forks its workers."""
    multiprocessing.set_start_method(None, force=True)


def end_where_a_queue_fails() -> None:
    """Lets this process end, with the system's error number, where it cannot send what it has: others would wait."""
    end = staticmethod(lambda error, item: os._exit(getattr(error, "errno", None) or 255))
    queues.Queue._on_queue_feeder_error = end  # type: ignore[attr-defined]


class _Popen(popen_fork.Popen):
    terminate = popen_fork.Popen.kill


class _DataWorker(ForkProcess):
    pass


_DataWorker._Popen = _Popen  # type: ignore[assignment,method-assign]


class KilledForks(ForkContext):
    """Context of multiprocessing that forks, and whose processes may ignore SIGTERM: terminate() sends SIGKILL.

    multiprocessing waits at exit for the children that it has terminated, however long that takes.
    """

    Process = _DataWorker


def run_exit_functions() -> None:
    """Calls what was registered with atexit, the last first: multiprocessing's processes end without."""
    atexit._run_exitfuncs()


def forget_forkserver() -> None:
    """Lets a forked process have a fork server of its own: its parent's is not its child."""
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]


def forkserver_exit_code(patience: float = PATIENCE_SECONDS) -> int | None:
    """Returns how the server has ended (negative: the signal that killed it); None: it lives, or never was.

    Leaves the server to be collected by multiprocessing.

    Args:
        patience: seconds to wait for a server that is just ending.
    """
    pid = _pid()
    deadline = time.monotonic() + patience
    while pid is not None:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # collected already, or another process's
            return None
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)
    return None


def _pid() -> int | None:
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
