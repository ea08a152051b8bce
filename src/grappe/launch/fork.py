"""Calls a function in a forked process, under limits; ends a process when the one that started it has ended.

The kernel ends it, so that no work goes on meanwhile. On a machine that is loaded forty times over, a thread that
watches the parent gets its turn seconds later, and not at all while another library keeps the interpreter. The kernel
needs no turn: it kills stopped processes, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from grappe import errors
from grappe.errors.causes import is_out_of_memory

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


_collects: list[bool] = []
"""Inside `parents_garbage_spared`: whether this process collects garbage outside of it."""


@contextlib.contextmanager
def parents_garbage_spared() -> Iterator[None]:
    """Context in which a forked child never collects its parent's garbage.

    The end of an earlier training's process group, for example, waits for threads that do not exist in the child. The
    child freezes what it inherits; if the parent did and undid it, its libraries would be searched for garbage, too.
    """
    _collects.append(gc.isenabled())
    gc.disable()
    try:
        yield
    finally:
        _collect_again()


def _collect_again() -> None:
    if _collects and _collects.pop():
        gc.enable()


def _spare_garbage() -> None:
    if _collects:
        gc.freeze()
        _collect_again()


os.register_at_fork(after_in_child=_spare_garbage)

DONE = "done"  # written by the child, as an exit code alone may be the task's own


def run_in_fork(work: Callable[[], str | None], limits: Limits | None = None) -> str:
    """Calls `work` in a forked process, under `limits`, and waits for the process.

    Returns:
        What `work` returned; "" for None.

    Raises:
        GrappeError: `work` raised an error, or the process died.
        LimitReached: the process took more than it may.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with parents_garbage_spared():
        begin = _own_memory(parent)  # garbage that the parent frees after the fork stays with the child
        pid = os.fork()
    if not pid:
        end_with_forking_parent(parent)
        os.close(reader)
        message = _message_of(work, limits)
        os.write(writer, message.encode()[:60_000])
        os._exit(0 if message.startswith(DONE) else 1)
    os.close(writer)
    with os.fdopen(reader) as stream:
        killed = limits is not None and limits.watch(pid, reader, begin)
        message = stream.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    name, _, text = message.partition("\n")
    if name == DONE:
        return text
    if not message and limits is not None and (reached := limits.reached(exit_code, killed)) is not None:
        raise reached
    if not text:
        text = (
            "the process that makes the model was killed, or ended itself: "
            "is the model larger than this machine's memory?"
        )
    raise getattr(errors, name, errors.TaskError)(text)


def _message_of(work: Callable[[], str | None], limits: Limits | None) -> str:
    """Calls `work` under `limits`; returns DONE and what `work` returned, or the error's class and message."""
    try:
        if limits is not None:
            limits.apply()
        message = f"{DONE}\n{work() or ''}"
    except errors.GrappeError as error:
        message = f"{type(error).__name__}\n{error}"
    except BaseException as error:
        traceback.print_exc()
        sentence = errors.user_code.sentence(error)
        if is_out_of_memory(error):
            made = errors.OutOfMemory(f"the process that makes the model ran out of memory: {sentence}")
        else:
            made = errors.TaskError(f"the model cannot be made: {sentence}")
        message = f"{type(made).__name__}\n{made}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return message


POLL_SECONDS = 0.02
PAGE = resource.getpagesize()


class LimitReached(errors.GrappeError):
    """The process needed more than its limit; the message names the limit and its size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a process may take beyond its memory at the fork."""

    memory: int
    """Bytes of its own."""
    mapped: int
    """Bytes of files that it maps into its address space, which cost no memory."""
    seconds: int
    """Seconds of computing, which a busy machine does not use up."""

    def apply(self) -> None:
        """Limits this process."""
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: self.seconds,
            resource.RLIMIT_AS: _statm()[0] * PAGE + self.memory + self.mapped,
        }
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(OSError, ValueError):  # not every system has every limit
                resource.setrlimit(kind, (most, hard))

    def watch(self, pid: int, pipe: int, begin: int) -> bool:
        """Waits until the process says something on `pipe`; kills it, and returns True, where it takes too much.

        A forked process begins with its parent's memory: `begin` bytes.

        The limit of the address space cannot tell mapped files from memory: so memory is looked at, too.
        """
        while not select.select([pipe], [], [], POLL_SECONDS)[0]:
            if _own_memory(pid) - begin > self.memory:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def reached(self, exit_code: int, killed: bool) -> LimitReached | None:
        """Returns the limit that ended a process without a report; None where no limit did."""
        if killed or exit_code == -signal.SIGABRT:  # how C++ ends where memory is refused
            return LimitReached(f"it needs more than {self.memory / 1e6:,.0f} MB of memory")
        if exit_code == -signal.SIGXCPU:
            return LimitReached(f"reading it takes longer than {self.seconds} s")
        return None


def _own_memory(pid: int) -> int:
    """Bytes that a process holds, without files and shared memory; 0 where the system does not tell."""
    resident, shared = _statm(pid)[1:3]
    return (resident - shared) * PAGE


def _statm(pid: int | str = "self") -> tuple[int, int, int]:
    """Pages of address space, of memory, and of memory that is files' or shared."""
    try:
        size, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except (OSError, ValueError):  # not on macOS
        return 0, 0, 0
    return int(size), int(resident), int(shared)
