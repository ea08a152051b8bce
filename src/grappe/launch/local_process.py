"""LocalProcess: one process of a local launch, seen from the command: its start, its report, its end."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from grappe import errors
from grappe.errors import GrappeError, ProcessDied, RunError
from grappe.errors.refused_memory import limits_set
from grappe.launch import child, files
from grappe.launch.child import Report, Terminal
from grappe.launch.files import IN_PART
from grappe.launch.rank import ProcessRank
from grappe.private_api.multiprocessing import forkserver_exit_code
from grappe.profiling import limits
from grappe.words import format_bytes, host_name

NAME = "grappe-rank-"
REFUSED = frozenset({1, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS})
"""Exit codes of libraries that got no memory and cannot say so: libgomp's is 1; oneDNN uses the address 0."""


class LocalProcess:
    """A process of one rank, and the pipe for its report."""

    def __init__(self, rank: ProcessRank, rendezvous_folder: Path) -> None:
        self._rank = rank
        self.log = child.early_log(rendezvous_folder, rank)
        self.report = Report(kind="none yet")
        self.process: Any = None
        self._ended = False
        self._killed_before = 0
        """Number of processes that the kernel had killed for want of memory when this one was started."""

    def start(self, payload: bytes, rendezvous_folder: Path, context: BaseContext) -> None:
        """Starts the process by `context`'s method."""
        self._killed_before = limits.killed()
        self.pipe, theirs = context.Pipe(duplex=False)
        terminal = _terminal() if self._rank.rank == 0 else None
        self.process = context.Process(  # type: ignore[attr-defined]
            target=child.run,
            args=(payload, self._rank, rendezvous_folder, theirs, terminal),
            name=f"{NAME}{self._rank.rank}",
        )
        try:
            with theirs, without_main():
                self.process.start()
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            raise ProcessDied(f"{self.name} could not be started: {server_end() or error}") from error
        finally:
            if terminal is not None:
                terminal.close()

    @property
    def name(self) -> str:
        """Returns the process's name for messages."""
        return f"process {self._rank.rank} of {self._rank.size} on {host_name()}"

    @property
    def reporting(self) -> bool:
        """Returns whether the report is still to come."""
        return self.report.kind == "none yet"

    def read_report(self) -> None:
        """Reads the report, if it has arrived."""
        try:
            if self.reporting and self.pipe.poll():
                self.report = self.pipe.recv()
        except (EOFError, OSError):
            self.report = Report(kind="silent")

    def join(self) -> None:
        """Waits for the process's end, and reads its report, or the message of `child.end_now`."""
        self.process.join()
        self._ended = True
        self.read_report()
        if self.reporting:
            self.report = Report(kind="silent")
        if self.report.kind == "silent":
            self.report = child.last_words(self.log) or self.report

    @property
    def exit_code(self) -> int:
        """The process's exit code; negative: the signal that killed it."""
        return self.process.exitcode or 0

    @property
    def why(self) -> str:
        """The likely cause of the process's end, without a full stop; "" if there is none to name."""
        return hint(self.exit_code, self._killed_before)

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it is alive."""
        if self.process is not None and self.process.pid and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills the process, if it is alive, and waits for its end."""
        self.signal(signal.SIGKILL)
        if self.process is not None and self.process.pid:
            self.process.join()
            self.pipe.close()


def server_end() -> str:
    """Tells how the server that processes are forked from has ended; "" where it lives."""
    code = forkserver_exit_code()
    if code is None:
        return ""
    server = f"the server on {host_name()} that processes are started from"
    if code < 0:
        name = signal_name(-code)
        why = hint(code)
        return f"{server} was killed by {name} ({why})" if why else f"{server} was killed by {name}"
    return f"{server} ended by itself with exit code {code}; what it wrote stands above"


def signal_name(number: int) -> str:
    """Returns a signal's name: SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def hint(code: int, killed_before: int | None = None) -> str:
    """Says what an exit code mostly comes from, without a full stop.

    Args:
        killed_before: how many processes the system had killed for want of memory when this one was started; None: not
            known.
    """
    if code == -signal.SIGKILL:
        group = limits.control_group()
        if group and killed_before is not None and limits.killed() > killed_before:
            return (
                f"the system did, as the processes of this job or container may have {format_bytes(group.size)} of "
                "memory together, and needed more: grappe foresee shows plans that need less"
            )
        return "the system does that when memory runs out: see `dmesg`, or use a smaller batch_size"
    limited = limits_set() if code in REFUSED else []
    if not limited:
        return ""
    return (
        f"libraries end so when they get no more memory, which is limited here: see {' and '.join(limited)}"
    )


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hides `__main__` from multiprocessing, which would run the user's script again in each process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _terminal() -> Terminal | None:
    """Duplicates this process's standard output; None if it is closed."""
    stream = sys.stdout
    # A notebook's or a test's stand-in names the descriptor that it hides; what reaches 1, it shows.
    descriptor = stream.fileno() if isinstance(stream, io.TextIOWrapper) else 1
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    if stream is not None:
        stream.flush()
    return Terminal(duplicate)


LAST_LINES = 12
UNKNOWN = 255  # exit code
LOST = ("closed by peer", "reset by peer", "Broken pipe")


def explanation(failed: Sequence[LocalProcess]) -> GrappeError:
    """Returns the error of the process that failed first, since the others' errors may follow from it."""
    first = min(failed, key=_how_late)
    if first.report.kind == "error":
        error = getattr(errors, first.report.error, GrappeError)(first.report.message)
        error.details = first.report.details
        return error
    died = ProcessDied(_end(first) + last_lines(first.log))
    died.killed = first.exit_code == -signal.SIGKILL
    return died


def lost_another(text: str) -> bool:
    """Returns whether an error with this text follows from another process's end."""
    return any(words in text for words in LOST)


def _how_late(process: LocalProcess) -> tuple[bool, bool, float]:
    # A kill is noticed by its peers before it is noticed here; but NCCL aborts a process whose peer has failed.
    ended = process.exit_code >= 0 or process.exit_code == -signal.SIGABRT
    # A process that fails while it connects has cut its peers off before it can say why.
    return ended, lost_another(process.report.message), process.report.when


def _end(process: LocalProcess) -> str:
    """Returns the sentence that says how a process has ended."""
    who, why, number = process.name, process.why, process.exit_code
    if number < 0:
        name = signal_name(-number)
        return f"{who} was killed by {name} ({why})" if why else f"{who} was killed by {name}"
    # What multiprocessing says where the server cannot tell any more.
    if number == UNKNOWN and (end := server_end()):
        return f"{who} was ended with what had started it: {end}"
    if process.report.kind == "crashed":
        return f"{who} failed with {process.report.error}"
    if why:
        return f"{who} ended by itself with exit code {number} ({why})"
    return f"{who} ended by itself with exit code {number}"


def last_lines(log: Path) -> str:
    """Formats the end of a process's log, of this start only, to follow a message."""
    try:
        lines = files.read_text(log.resolve(), IN_PART).rstrip().splitlines()  # a link of this start's own
    except (OSError, RunError):
        return ""
    begins = [index for index, line in enumerate(lines) if line.startswith(child.STARTED)]
    lines = lines[begins[-1] + 1 :] if begins else lines
    return "".join(f"\n  | {line}" for line in lines[-LAST_LINES:])
