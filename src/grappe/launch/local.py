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
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import cloudpickle

from grappe.errors import TaskError
from grappe.launch.local_process import NAME, LocalProcess, explanation, without_main
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


class Launch:
    """The processes of one function, from their start to the result of process 0; several may run side by side.

    The processes are forked from a server that has torch imported and no threads started, so that they start in about
    a second; a single process is forked from this one if this one is as clean. `argument` is pickled by value,
    including classes of a notebook.

    Args:
        function: "package.module:name", called as function(argument, process, rendezvous_folder).
        signals: what forwards this command's signals to `started`.
        started: gets each process as it is started, and loses them all in `close`.
        environment: variables that these processes have beside this one's.
        from_training: whether a process that was launched itself may start them.
    """

    def __init__(
        self,
        function: str,
        argument: Any,
        processes: int,
        signals: SignalForwarding,
        started: list[LocalProcess],
        environment: Mapping[str, str] | None = None,
        *,
        from_training: bool = False,
    ) -> None:
        if not from_training and multiprocessing.current_process().name.startswith(NAME):
            raise TaskError(
                "the task's file starts processes itself when it is loaded: put that under "
                'if __name__ == "__main__":, or leave it out'
            )
        self._call, self._count, self._environment = (function, argument), processes, environment or {}
        self._folder = Path(tempfile.mkdtemp(prefix="grappe-"))
        self._signals, self._all, self._mine = signals, started, list[LocalProcess]()
        self._living: dict[Any, LocalProcess] = {}
        self._failed: list[LocalProcess] = []
        self._deadline: float | None = None

    def start(self) -> None:
        """Starts the processes."""
        with sleeping_threads():
            try:
                payload = cloudpickle.dumps((*self._call, {**os.environ, **self._environment}))
            except Exception as error:
                raise TaskError(
                    f"the task cannot be sent to its processes ({type(error).__name__}: {error}): make what "
                    "holds an open file, a lock or a thread inside data() or model(), or put the task in a file: "
                    "grappe.train('task.py')"
                ) from error
        context = _context(self._count)
        secret = secrets.token_hex(32)
        for rank in range(self._count):
            process = LocalProcess(
                ProcessRank(
                    rank=rank,
                    size=self._count,
                    local_rank=rank,
                    local_size=self._count,
                    job=self._folder.name,
                    secret=secret,
                ),
                self._folder,
            )
            self._mine.append(process)
            self._all.append(process)
            # Lost would be what reaches a process that cannot save yet: StopSignal.install lifts the mask.
            with signals_blocked():
                process.start(payload, self._folder, context)
            self._living[process.process.sentinel] = process
            self._signals.catch_up(process)

    @property
    def handles(self) -> list[Any]:
        """Lists objects for multiprocessing.connection.wait."""
        # A report may be larger than its pipe holds, so it is read while its process waits to be rid of it.
        return [*self._living, *(process.pipe for process in self._living.values() if process.reporting)]

    @property
    def patience(self) -> float | None:
        """Seconds until processes that another's failure left behind are ended; None: there is no failure."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def over(self) -> bool:
        """Returns whether there is a result."""
        return not self._living or self.patience == 0.0

    @property
    def killed(self) -> bool:
        """Returns whether a process was killed from outside, as SIGKILL alone does for certain."""
        return any(
            process.report.kind == "silent" and process.exit_code == -signal.SIGKILL
            for process in self._failed
        )

    def advance(self, ready: Sequence[Any]) -> None:
        """Takes in what is ready of `handles`; if one process fails, the others get a short time to report."""
        for process in list(self._living.values()):
            if process.pipe in ready:
                process.read_report()
            if process.process.sentinel in ready:
                del self._living[process.process.sentinel]
                process.join()
                if process.report.kind != "returned":
                    self._failed.append(process)
        if self._failed and self._deadline is None:
            self._deadline = time.monotonic() + GRACE_SECONDS

    def result(self) -> Any:
        """Returns the result of process 0, once it is `over`.

        Raises:
            GrappeError: a process raised it; ProcessDied if a process ended unexpectedly, with its name and last lines.
        """
        if self._failed:
            raise explanation(self._failed)
        return self._mine[0].report.value

    def close(self) -> None:
        """Kills what is left, and removes the rendezvous folder."""
        for process in self._mine:
            process.kill()
        self._all[:] = [process for process in self._all if process not in self._mine]
        shutil.rmtree(self._folder, ignore_errors=True)


def advance(launches: Sequence[Launch], seconds: float) -> None:
    """Waits until something happens in one of `launches`, but at most `seconds`, and takes it in."""
    patience = min((launch.patience for launch in launches if launch.patience is not None), default=seconds)
    ready = wait([handle for launch in launches for handle in launch.handles], min(patience, seconds))
    for launch in launches:
        launch.advance(ready)


def local(
    function: str, argument: Any, processes: int, *, saves: bool = False, from_training: bool = False
) -> Any:
    """Runs `function` in new processes of this machine (see Launch), and waits for them.

    Args:
        saves: whether a signal makes the function save and return (see StopSignal); else the processes are ended.

        from_training: whether a process that was launched itself may start them.

    Returns:
        The result of process 0.

    Raises:
        GrappeError: a process raised it; ProcessDied if a process ended unexpectedly, with its name and last lines.
        KeyboardInterrupt: after Ctrl-C; with `saves`, after the second one.
    """
    started: list[LocalProcess] = []
    with SignalForwarding(started, saves) as signals:
        launch = Launch(function, argument, processes, signals, started, from_training=from_training)
        try:
            launch.start()
            while not launch.over:
                launch.advance(wait(launch.handles, launch.patience))
            return launch.result()
        finally:
            signals.over = True
            launch.close()


def _context(processes: int) -> BaseContext:
    """Chooses how to start processes: a single one is forked from this process, if nothing here can disturb a training.

    A server costs the start of another interpreter, which pays off for processes that share its imports, now or
    later in this command.
    """
    if processes == 1 and _is_clean() and not forkserver_is_running():
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
