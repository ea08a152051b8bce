"""Local launch: starts a plan's processes on this machine, waits for them, and returns process 0's result."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import cloudpickle

from grappe.errors import TaskError
from grappe.launch.failure import explanation
from grappe.launch.local_process import NAME, LocalProcess, without_main
from grappe.launch.openmp import sleeping_threads
from grappe.launch.orphan import parent_pipe_in_environment
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import SIGNALS, SignalForwarding, signals_blocked
from grappe.private_api.multiprocessing import forkserver_is_running

GRACE_SECONDS = 3.0
METRICS = "grappe.launch.preload_metrics"
PRELOADED = ("grappe.launch.server", "grappe.launch.preload")
TASKS = Path("/proc/self/task")  # a folder for each thread


def start_server(*, metrics: bool = True) -> None:
    """Starts the server that processes are forked from, unless it runs: the server imports torch in the background.

    Args:
        metrics: whether the server imports torchmetrics too, which takes a second. Else each process that needs
            torchmetrics imports it.
    """
    multiprocessing.set_forkserver_preload([*PRELOADED, *[METRICS] * metrics])
    # A signal to the whole group must not end the server either.
    with signals_blocked(), without_main(), sleeping_threads(), parent_pipe_in_environment():
        resource_tracker.ensure_running()  # which lifts a part of the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        forkserver.ensure_running()


def local(function: str, argument: Any, processes: int, *, saves: bool = False) -> Any:
    """Runs `function` ("package.module:name") as function(argument, process, rendezvous_folder) in new processes.

    The processes are forked from a server that has torch imported and no threads started, so that they start in about
    a second; a single process is forked from this one if this one is as clean. `argument` is pickled by value,
    including classes of a notebook.

    Args:
        saves: whether a signal makes the function save and return (see StopSignal); else the processes are ended.

    Returns:
        The result of process 0.

    Raises:
        GrappeError: a process raised it; ProcessDied if a process ended unexpectedly, with its name and last lines.
        KeyboardInterrupt: after Ctrl-C; with `saves`, after the second one.
    """
    if multiprocessing.current_process().name.startswith(NAME):
        raise TaskError(
            "the task's file starts processes itself when it is loaded: put that under "
            'if __name__ == "__main__":, or leave it out'
        )
    rendezvous_folder = Path(tempfile.mkdtemp(prefix="grappe-"))
    started: list[LocalProcess] = []
    with SignalForwarding(started, saves) as signals:
        try:
            with sleeping_threads():
                payload = cloudpickle.dumps((function, argument, dict(os.environ)))
            context = _context(processes)
            secret = secrets.token_hex(32)
            for rank in range(processes):
                process = LocalProcess(
                    ProcessRank(
                        rank=rank,
                        size=processes,
                        local_rank=rank,
                        local_size=processes,
                        job=rendezvous_folder.name,
                        secret=secret,
                    ),
                    rendezvous_folder,
                )
                started.append(process)
                # Lost would be what reaches a process that cannot save yet: StopSignal.install lifts the mask.
                with signals_blocked():
                    process.start(payload, rendezvous_folder, context)
                signals.catch_up(process)
            return _watch(started)
        finally:
            signals.over = True
            for process in started:
                process.kill()
            shutil.rmtree(rendezvous_folder, ignore_errors=True)


def _context(processes: int) -> BaseContext:
    """Chooses how to start processes: a single one is forked from this process, if nothing here can disturb a training.

    A server costs the start of another interpreter, which pays off for processes that share its imports, now or
    later in this command.
    """
    if processes == 1 and _is_clean() and not _server_runs():
        return multiprocessing.get_context("fork")
    start_server()
    return multiprocessing.get_context("forkserver")


def _is_clean() -> bool:
    """Returns whether a fork is safe: no other thread, whose locks would stay held, and no torch set up by a caller."""
    try:
        threads = len(list(TASKS.iterdir()))
    except OSError:  # not on macOS, whose libraries do not bear a fork either
        return False
    return threads == 1 and "torch" not in sys.modules


def _server_runs() -> bool:
    return forkserver_is_running()


def _watch(processes: Sequence[LocalProcess]) -> Any:
    """Waits for all processes; if one fails, the others get a short time to report, and are then ended."""
    living = {one.process.sentinel: one for one in processes}
    failed: list[LocalProcess] = []
    deadline: float | None = None
    while living and (deadline is None or time.monotonic() < deadline):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        # A report may be larger than its pipe holds, so it is read while its process waits to be rid of it.
        ready = wait([*living, *(one.pipe for one in living.values() if one.reporting)], patience)
        for one in list(living.values()):
            if one.pipe in ready:
                one.read_report()
            if one.process.sentinel in ready:
                del living[one.process.sentinel]
                one.join()
                if one.report.kind != "returned":
                    failed.append(one)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failed:
        raise explanation(failed)
    return processes[0].report.value
