"""Launch: starts a plan's processes on this machine, watches over them, and brings back what process 0 returns."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import cloudpickle

from grappe import errors
from grappe.errors import GrappeError, ProcessDied
from grappe.world import Place

GRACE_SECONDS = 3.0
LAST_LINES = 12


def local(function: str, argument: Any, processes: int) -> Any:
    """Runs `function` ("package.module:name") as function(argument, place, meet) in `processes` new processes.

    They are forked from a server that has torch imported and no threads started, so that they start in about
    a second; `argument` travels by value, classes of a notebook too.

    Returns:
        What process 0 returned.

    Raises:
        GrappeError: raised by one of them; ProcessDied when one ended unasked, named with its last lines.
    """
    meet = Path(tempfile.mkdtemp(prefix="grappe-"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["grappe.preload"])
    payload = cloudpickle.dumps((function, argument))
    children: list[_Child] = []
    try:
        with _without_main():
            for rank in range(processes):
                place = Place(rank=rank, size=processes, local_rank=rank, local_size=processes, job=meet.name)
                children.append(_Child(context, payload, place, meet))
        return _watch(children)
    finally:
        for child in children:
            child.kill()
        shutil.rmtree(meet, ignore_errors=True)


class _Child:
    """One process, and the pipe that it reports on."""

    def __init__(self, context: Any, payload: bytes, place: Place, meet: Path) -> None:
        self.place = place
        self.log = meet / f"rank-{place.rank}.log"
        self.report: tuple[str, Any] | None = None
        self.pipe, theirs = context.Pipe(duplex=False)
        sys.stdout.flush()
        terminal = DupFd(_descriptor(sys.stdout)) if place.rank == 0 else None
        self.process: ForkServerProcess = context.Process(
            target=_DelayedDup(terminal), args=(payload, place, meet, theirs), name=f"grappe-{place.rank}"
        )
        self.process.start()
        theirs.close()

    def hear(self) -> None:
        """Takes its report, if it sent one."""
        with contextlib.suppress(EOFError, OSError):
            while self.report is None and self.pipe.poll():
                self.report = self.pipe.recv()

    def kill(self) -> None:
        """Ends it, if it still lives."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _watch(children: list[_Child]) -> Any:
    """Waits for all; when one fails, the others get a short grace to report, and are ended."""
    failed: list[_Child] = []
    deadline: float | None = None
    with _forwarded_signals(children):
        waiting = {child.process.sentinel: child for child in children}
        while waiting:
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = wait(
                [*waiting, *(child.pipe for child in waiting.values() if child.report is None)], patience
            )
            for child in list(waiting.values()):
                if child.pipe in ended:
                    child.hear()
                    if child.report is None:
                        child.report = ("silent", None)
                if child.process.sentinel in ended:
                    child.process.join()
                    if child.report is None:
                        child.hear()
                    del waiting[child.process.sentinel]
                    if child.process.exitcode != 0:
                        failed.append(child)
            if failed and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                break
    if failed:
        raise _explanation(failed, children)
    kind, value = children[0].report or ("silent", None)
    assert kind == "returned", kind
    return value


def _explanation(failed: list[_Child], children: list[_Child]) -> GrappeError:
    """The error to show: what a process said of itself, else the first that died."""
    for child in [*failed, *children]:
        if child.report and child.report[0] == "error":
            name, message, details = child.report[1]
            error = getattr(errors, name, GrappeError)(message)
            error.details = details
            return error
    crashed = [child for child in failed if child.process.exitcode and child.process.exitcode < 0] or failed
    child = crashed[0]
    code = child.process.exitcode or 0
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (the system does that when memory runs out: see `dmesg`, or use a smaller batch_size)"
    return ProcessDied(
        f"process {child.place.rank} of {child.place.size} on {os.uname().nodename} {how}{hint}"
        f"{last_lines(child.log)}"
    )


def last_lines(log: Path) -> str:
    """The end of a process's log, ready to follow a message."""
    try:
        lines = log.read_text(errors="replace").rstrip().splitlines()[-LAST_LINES:]
    except OSError:
        return ""
    return "".join(f"\n  | {line}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _forwarded_signals(children: list[_Child]) -> Iterator[None]:
    """A signal to us goes on to the processes, which save and end; a second Ctrl-C ends them at once."""
    interrupts = 0

    def forward(number: int, frame: types.FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        for child in children:
            if child.process.is_alive() and child.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGKILL if interrupts > 1 else number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    try:
        before = {number: signal.signal(number, forward) for number in numbers}
    except ValueError:  # not the main thread: a notebook's worker, say
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """multiprocessing would run the user's script again in each process; what they need travels by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _descriptor(stream: Any) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's or a test's stand-in
        return 1


class _DelayedDup:
    """The target of a child process: takes over the terminal's descriptor, then runs."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def __call__(self, payload: bytes, place: Place, meet: Path, pipe: Connection) -> None:
        _run_child(payload, place, meet, pipe, self.terminal)


def _run_child(payload: bytes, place: Place, meet: Path, pipe: Connection, terminal: Any) -> None:
    _die_with_parent()
    if terminal is not None:
        os.environ["GRAPPE_TERMINAL"] = str(terminal.detach())
    redirect(meet / f"rank-{place.rank}.log")
    code = 1
    try:
        name, argument = cloudpickle.loads(payload)
        module, _, attribute = name.partition(":")
        pipe.send(("returned", getattr(importlib.import_module(module), attribute)(argument, place, meet)))
        code = 0
    except GrappeError as error:
        pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
        code = error.exit_code
    except BaseException:  # the last lines of the log tell the user
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.close()
        os._exit(code)  # communication threads of a failed step may never join


def redirect(log: Path) -> None:
    """Sends this process's standard output and error to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _die_with_parent() -> None:
    """Asks Linux to kill this process when the server that forked it ends: no orphan survives us."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
