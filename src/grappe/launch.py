"""Launch: starts a plan's processes on this machine, watches over them, and brings back what process 0 returns."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle

from grappe import child, errors
from grappe.child import Report, Terminal
from grappe.errors import GrappeError, ProcessDied
from grappe.interrupt import SIGNALS, handled
from grappe.world import Place

GRACE_SECONDS = 3.0
LAST_LINES = 12


def warm() -> None:
    """Starts the server that processes are forked from, if there is none: it imports torch while we go on."""
    multiprocessing.set_forkserver_preload(["grappe.preload"])
    # A signal to the whole group must neither end the server nor be lost on a process that cannot save yet:
    # both inherit this mask, and a process lifts it when it is ready (Interrupt.install).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with _without_main():
            resource_tracker.ensure_running()  # which lifts a part of the mask
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def local(function: str, argument: Any, processes: int, *, saves: bool = False) -> Any:
    """Runs `function` ("package.module:name") as function(argument, place, meet) in `processes` new processes.

    They are forked from a server that has torch imported and no threads started, so that they start in about
    a second; `argument` travels by value, classes of a notebook too.

    Args:
        saves: whether a signal makes the function save and return (see Interrupt); else it is ended.

    Returns:
        What process 0 returned.

    Raises:
        GrappeError: raised by one of them; ProcessDied when one ended unasked, named with its last lines.
        KeyboardInterrupt: after Ctrl-C; with `saves`, after the second one.
    """
    meet = Path(tempfile.mkdtemp(prefix="grappe-"))
    children: list[_Child] = []
    with _Signals(children, saves) as signals:
        try:
            payload = cloudpickle.dumps((function, argument, dict(os.environ)))
            warm()
            for rank in range(processes):
                place = Place(rank=rank, size=processes, local_rank=rank, local_size=processes, job=meet.name)
                children.append(_Child(place, meet))
                children[-1].start(payload, meet)
                signals.catch_up(children[-1])
            return _watch(children)
        finally:
            signals.over = True
            for one in children:
                one.end()
            shutil.rmtree(meet, ignore_errors=True)


class _Child:
    """One process, and the pipe that it reports on."""

    def __init__(self, place: Place, meet: Path) -> None:
        self.place = place
        self.log = child.early_log(meet, place)
        self.report: Report | None = None
        self.ended_at = 0.0
        self.process: ForkServerProcess | None = None

    def start(self, payload: bytes, meet: Path) -> None:
        """Forks it."""
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe(duplex=False)
        terminal = _terminal() if self.place.rank == 0 else None
        self.process = context.Process(
            target=child.run, args=(payload, self.place, meet, theirs, terminal), name=f"grappe-{self.place.rank}"
        )
        with theirs, _without_main():
            self.process.start()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"process {self.place.rank} of {self.place.size} on {os.uname().nodename}"

    def hear(self) -> None:
        """Takes its report, if it sent one."""
        with contextlib.suppress(EOFError, OSError):
            while self.report is None and self.pipe.poll():
                self.report = self.pipe.recv()

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        if self.process is not None and self.process.pid and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def end(self) -> None:
        """Ends it, if it still lives."""
        self.signal(signal.SIGKILL)
        if self.process is not None and self.process.pid:
            self.process.join()
            self.pipe.close()


def _watch(children: list[_Child]) -> Any:
    """Waits for all; when one fails, the others get a short grace to report, and are ended."""
    living = {one.process.sentinel: one for one in children}
    failed: list[_Child] = []
    deadline: float | None = None
    while living and (deadline is None or time.monotonic() < deadline):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        # A report may be larger than its pipe holds, so it is read while its process waits to be rid of it.
        ready = wait([*living, *(one.pipe for one in living.values() if one.report is None)], patience)
        for one in list(living.values()):
            if one.pipe in ready:
                one.hear()
            if one.process.sentinel in ready:
                del living[one.process.sentinel]
                one.settle()
                if one.failed:
                    failed.append(one)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failed:
        raise _explanation(failed)
    assert children[0].report is not None
    return children[0].report.value
