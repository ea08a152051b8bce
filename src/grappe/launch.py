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
from pathlib import Path
from typing import Any

import cloudpickle

from grappe import child, errors
from grappe.child import Report, Terminal
from grappe.errors import GrappeError, ProcessDied, TaskError
from grappe.interrupt import SIGNALS, handled
from grappe.place import Place

NAME = "grappe-rank-"
GRACE_SECONDS = 3.0
LAST_LINES = 12
METRICS = "torchmetrics"


def warm(*, metrics: bool = True) -> None:
    """Starts the server that processes are forked from, if there is none: it imports torch while we go on.

    Args:
        metrics: whether it imports torchmetrics too, which takes a second. Else each process does that needs it.
    """
    multiprocessing.set_forkserver_preload(["grappe.preload", *[METRICS] * metrics])
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
    if multiprocessing.current_process().name.startswith(NAME):
        raise TaskError(
            "the task's file starts processes itself when it is loaded: put that under "
            'if __name__ == "__main__":, or leave it out'
        )
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
        self.report = Report(kind="none yet")
        self.process: Any = None
        self.ended = False

    def start(self, payload: bytes, meet: Path) -> None:
        """Forks it."""
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe(duplex=False)
        terminal = _terminal() if self.place.rank == 0 else None
        self.process = context.Process(
            target=child.run,
            args=(payload, self.place, meet, theirs, terminal),
            name=f"{NAME}{self.place.rank}",
        )
        with theirs, _without_main():
            self.process.start()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"process {self.place.rank} of {self.place.size} on {os.uname().nodename}"

    @property
    def waits(self) -> bool:
        """Whether its report is still to come."""
        return self.report.kind == "none yet"

    def hear(self) -> None:
        """Takes its report, if there is one to read."""
        try:
            if self.waits and self.pipe.poll():
                self.report = self.pipe.recv()
        except (EOFError, OSError):
            self.report = Report(kind="silent")

    def over(self) -> None:
        """Takes note that it has ended."""
        self.process.join()
        self.ended = True
        self.hear()
        if self.waits:
            self.report = Report(kind="silent")
        if self.report.kind == "silent":
            self.report = child.last_words(self.log) or self.report

    @property
    def code(self) -> int:
        """Its exit code; negative: the signal that killed it."""
        return self.process.exitcode or 0

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        if self.process is not None and self.process.pid and not self.ended:
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
        ready = wait([*living, *(one.pipe for one in living.values() if one.waits)], patience)
        for one in list(living.values()):
            if one.pipe in ready:
                one.hear()
            if one.process.sentinel in ready:
                del living[one.process.sentinel]
                one.over()
                if one.report.kind != "returned":
                    failed.append(one)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failed:
        raise _explanation(failed)
    return children[0].report.value


def _explanation(failed: list[_Child]) -> GrappeError:
    """The error to show: that of the process which failed first, since the others' may follow from it."""
    # A kill is noticed by its peers before it is noticed here; but NCCL aborts a process whose peer has failed.
    first = min(failed, key=lambda one: (one.code >= 0 or one.code == -signal.SIGABRT, one.report.when))
    if first.report.kind == "error":
        error = getattr(errors, first.report.error, GrappeError)(first.report.message)
        error.details = first.report.details
        return error
    hint = ""
    if first.code == -signal.SIGKILL:
        hint = " (the system does that when memory runs out: see `dmesg`, or use a smaller batch_size)"
    return ProcessDied(f"{first.name} {_how_it_ended(first)}{hint}{last_lines(first.log)}")


def _how_it_ended(one: _Child) -> str:
    if one.code < 0:
        return f"was killed by {_signal_name(-one.code)}"
    if one.report.kind == "crashed":
        return f"failed with {one.report.error}"
    return f"ended by itself with exit code {one.code}"


def last_lines(log: Path) -> str:
    """The end of a process's log, of this start only, ready to follow a message."""
    try:
        lines = log.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    begins = [index for index, line in enumerate(lines) if line.startswith(child.STARTED)]
    lines = lines[begins[-1] + 1 :] if begins else lines
    return "".join(f"\n  | {line}" for line in lines[-LAST_LINES:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Deadly(BaseException):
    """A signal that ends all at once."""


class _Signals:
    """What signals to us do while processes run.

    The first is passed on to processes that save and end; a second Ctrl-C, or any signal to processes that
    have nothing to save, ends them at once, and then has the effect that it would have had without us.
    """

    def __init__(self, children: list[_Child], saves: bool) -> None:
        self._children, self._saves = children, saves
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        self.over = False

    def __enter__(self) -> _Signals:
        # Elsewhere than in the main thread (a notebook's worker, say) signals are not ours.
        with contextlib.suppress(ValueError):
            for number in handled():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self._received.append(number)
        if self.over:
            return
        if not self._saves or self._received.count(signal.SIGINT) > 1:
            self.over = True
            raise _Deadly
        for one in self._children:
            one.signal(number)

    def catch_up(self, one: _Child) -> None:
        """Sends a new process what came before it was there."""
        for number in self._received:
            one.signal(number)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, _Deadly):
            signal.raise_signal(self._received[-1])
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """multiprocessing would run the user's script again in each process; what they need travels by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _terminal() -> Terminal | None:
    """Where our own standard output goes."""
    stream = sys.stdout
    # A notebook's or a test's stand-in names the descriptor that it hides; what reaches 1, it shows.
    descriptor = stream.fileno() if isinstance(stream, io.TextIOWrapper) else 1
    try:
        os.fstat(descriptor)
    except OSError:
        return None
    if stream is not None:
        stream.flush()
    return Terminal(descriptor)
