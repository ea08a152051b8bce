"""Failure: the error to show when local processes have failed: the first one to fail, its end, its last lines."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from grappe import errors
from grappe.errors import GrappeError, ProcessDied, RunError
from grappe.launch import child, files
from grappe.launch.files import IN_PART
from grappe.launch.local_process import LocalProcess, server_end, signal_name

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
