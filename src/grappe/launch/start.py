"""Starts a function on a plan's processes, torchrun's or srun's, or local ones; ends a launcher's processes.

An error is reported once, and exit codes pass through torchrun and srun.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grappe.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ComputedWrongly,
    GrappeError,
    ProcessDied,
    RunError,
    of_file,
)
from grappe.launch import files, imports, local, mps
from grappe.launch.child import FAILURE, accuse, fail
from grappe.launch.files import rendezvous_folder_of
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.plan import Plan
from grappe.words import host_name

LEAVING_SECONDS = 2.0
WHY = ".why"  # suffix of the file next to it, with the error


def start(
    function: str,
    request: Any,
    plan: Plan,
    *,
    run: Path | None = None,
    saves: bool = False,
    restarts: int = 0,
    meanwhile: Callable[[], None] | None = None,
) -> Any:
    """Runs `function` as function(request, process, rendezvous_folder) on the plan's processes.

    Args:
        function: "package.module:name", imported in each process.
        request: pickled by value.
        run: a folder that all nodes see, for their rendezvous: the run's; None: the one that the launcher gives.
        saves: whether a signal makes the function save and return.
        restarts: of local processes, after one was killed from outside.
        meanwhile: called about once a second while local processes run.

    Returns:
        The result of process 0; under a launcher, of this process.

    Raises:
        GrappeError: the function failed. Under a launcher one process raises it, and the others SystemExit.
    """
    process = rank_from_environment()
    if process is None:
        with mps.shared_gpus(plan, None):
            return local.local(function, request, plan.processes, saves=saves, restarts=restarts, meanwhile=meanwhile)
    plan.check_fits(process.size)
    try:
        with mps.shared_gpus(plan, process):
            return imports.function(function)(request, process, rendezvous_folder_of(process, run))
    except Exception as error:
        raise reported_once(error, process) from error


def reported_once(error: Exception, process: ProcessRank) -> BaseException:
    """Returns `error` for the user in one process; SystemExit in the others."""
    from grappe.launch.rendezvous import claims_error_report

    if isinstance(error, OSError) and error.filename is not None:
        error = of_file(error)
    ours = isinstance(error, GrappeError)
    code = error.exit_code if ours else EXIT_FAILURE
    if isinstance(error, GrappeError):
        accuse(error.nodes)
    if not isinstance(error, ComputedWrongly) and (ours or not local.lost_another(str(error))):
        fail(code)
    if not claims_error_report(process):
        return SystemExit(code)
    name = f"process {process.rank} of {process.size} on {host_name()}"
    if ours:
        kind: type[GrappeError] = type(error)
        reported = kind.__new__(kind)  # a class may take other arguments than its text
        reported.args = (f"{name}: {error}" if process.rank else str(error),)
    else:
        how = f"failed with {type(error).__name__}: {error}"
        if local.lost_another(str(error)):
            how = "lost another process, which has ended: see the launcher's message"
        reported = ProcessDied(f"{name} {how}")
    reported.by = name
    reported.details = "".join(traceback.format_exception(error))
    return reported


def leave_error(error: GrappeError) -> int:
    """Writes the error for the command that submitted this process's job; returns the exit code.

    In a job it is a shell's where a process was killed, which the job's script goes on after.
    """
    killed = isinstance(error, ProcessDied) and error.killed
    if file := os.environ.get(FAILURE):
        why = {"error": type(error).__name__, "message": str(error), "killed": killed}
        with contextlib.suppress(OSError, RunError):
            files.replace(Path(file).with_suffix(WHY), json.dumps(why).encode(), files.IN_PART)
    return 128 + signal.SIGKILL if file and killed else error.exit_code


def interrupted() -> int:
    """Returns the exit code of an interrupted training: 75 on process 0, once the others have ended with 0.

    `srun --kill-on-bad-exit` would kill the others at the first 75, and torchrun turns any failure into 1.
    """
    process = rank_from_environment()
    if process is None or process.size == 1:
        return EXIT_INTERRUPTED
    if process.rank:
        sys.stdout.flush()
        os._exit(EXIT_OK)  # at once, and not after the seconds that Python takes to tidy up
    time.sleep(LEAVING_SECONDS)
    return EXIT_INTERRUPTED
