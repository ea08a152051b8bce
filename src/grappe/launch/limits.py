"""Limits: how much memory and time a forked process may take that reads what a stranger made."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import select
import signal
from pathlib import Path

from grappe.errors import GrappeError

POLL_SECONDS = 0.02
PAGE = resource.getpagesize()


class LimitReached(GrappeError):
    """The process needed more than it may have; the message says of what, and how much that is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a process may take beyond what it has when it is forked."""

    memory: int
    """Bytes of its own."""
    mapped: int
    """Bytes of files that it maps into its address space, which cost no memory."""
    seconds: int
    """Of computing. A machine that is busy does not use them up."""

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

    def watch(self, pid: int, pipe: int) -> bool:
        """Waits until the process says something on `pipe`; kills it, and returns True, where it takes too much.

        The limit of the address space cannot tell mapped files from memory: so memory is looked at, too.
        """
        begin = _own_memory(os.getpid())  # a forked process begins with its parent's
        while not select.select([pipe], [], [], POLL_SECONDS)[0]:
            if _own_memory(pid) - begin > self.memory:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def reached(self, exit_code: int, killed: bool) -> LimitReached | None:
        """Returns the limit that ended a process that said nothing; None where it was no limit."""
        if killed or exit_code == -signal.SIGABRT:  # how C++ ends where memory is refused
            return LimitReached(f"it needs more than {self.memory / 1e6:,.0f} MB of memory")
        if exit_code == -signal.SIGXCPU:
            return LimitReached(f"reading it takes longer than {self.seconds} s")
        return None


def _own_memory(pid: int) -> int:
    """Bytes that a process holds and that are neither files nor shared; 0 where that cannot be known."""
    resident, shared = _statm(pid)[1:3]
    return (resident - shared) * PAGE


def _statm(pid: int | str = "self") -> tuple[int, int, int]:
    """Pages of address space, of memory, and of memory that is files' or shared."""
    try:
        size, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except (OSError, ValueError):  # not on macOS
        return 0, 0, 0
    return int(size), int(resident), int(shared)
