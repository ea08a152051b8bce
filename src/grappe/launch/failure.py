"""Failure: the error to show when local processes have failed: the first one to fail, its end, its last lines."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from grappe import errors
from grappe.errors import GrappeError, ProcessDied
from grappe.launch import child
from grappe.launch.local_process import LocalProcess

LAST_LINES = 12


def explanation(failed: Sequence[LocalProcess]) -> GrappeError:
    """Returns the error of the process that failed first, since the others' errors may follow from it."""
    # A kill is noticed by its peers before it is noticed here; but NCCL aborts a process whose peer has failed.
    first = min(
        failed, key=lambda one: (one.exit_code >= 0 or one.exit_code == -signal.SIGABRT, one.report.when)
    )
    if first.report.kind == "error":
        error = getattr(errors, first.report.error, GrappeError)(first.report.message)
        error.details = first.report.details
        return error
    hint = ""
    if first.exit_code == -signal.SIGKILL:
        hint = " (the system does that when memory runs out: see `dmesg`, or use a smaller batch_size)"
    return ProcessDied(f"{first.name} {_how_it_ended(first)}{hint}{last_lines(first.log)}")


def _how_it_ended(process: LocalProcess) -> str:
    if process.exit_code < 0:
        return f"was killed by {_signal_name(-process.exit_code)}"
    if process.report.kind == "crashed":
        return f"failed with {process.report.error}"
    return f"ended by itself with exit code {process.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(log: Path) -> str:
    """Formats the end of a process's log, of this start only, to follow a message."""
    try:
        lines = log.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    begins = [index for index, line in enumerate(lines) if line.startswith(child.STARTED)]
    lines = lines[begins[-1] + 1 :] if begins else lines
    return "".join(f"\n  | {line}" for line in lines[-LAST_LINES:])
