"""Local trainings: trains trials in processes of this machine, which end with this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from grappe.checkpoint.lease import Lease
from grappe.errors import DataError, GrappeError, RunError, UsageError
from grappe.launch.local import Launch, advance
from grappe.launch.local_process import LocalProcess
from grappe.launch.signals import SignalForwarding
from grappe.plan import Plan
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.verbs.tune import gpus
from grappe.verbs.tune.trainings import Busy, Ended

OF_THE_MACHINE = (RunError, DataError)
"""Errors of the machine, not of a trial's fields: the study stops, and goes on from there when it is started again."""
KILLED = "it was killed (by SIGKILL, as the system does when memory runs out)"


class LocalTrainings:
    """Trains at most `parallel` trials at a time in processes of this machine.

    Args:
        limited: whether the trainings have a time limit.
        plans: that trials have.
    """

    def __init__(self, *, parallel: int, limited: bool, plans: Sequence[Plan]) -> None:
        self._parallel, self._most = parallel, max(map(gpus.needed, plans))
        self._limited = limited or "SLURM_JOB_END_TIME" in os.environ
        self._running: dict[int, tuple[int, Launch]] = {}
        self._processes: list[LocalProcess] = []
        self._signals = SignalForwarding(self._processes, saves=True)
        self._gpus = gpus.visible()
        self.notes = ""

    def __enter__(self) -> LocalTrainings:
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._signals.over = True
            for _, launch in self._running.values():
                launch.close()
        finally:
            self._signals.__exit__(*error)  # type: ignore[arg-type]

    @property
    def running(self) -> frozenset[int]:
        """The trials that are being trained."""
        return frozenset(self._running)

    @property
    def stopping(self) -> bool:
        """True if a signal has come."""
        return self._signals.received

    def start(self, number: int, request: Request) -> None:
        """Starts a trial's processes."""
        folder = request.run
        assert folder is not None
        if Run.is_run(folder) and (who := Lease(folder).held_by()):
            raise Busy(f"{folder.name} is being written by {who}")
        place = min(set(range(self._parallel)) - {place for place, _ in self._running.values()})
        launch = Launch(
            "grappe.training.worker:worker",
            request,
            request.plan.processes,
            self._signals,
            self._processes,
            gpus.variables(request.plan, place, self._gpus, self._most),
        )
        self._running[number] = (place, launch)
        launch.start()

    def look(self, seconds: float) -> list[Ended]:
        """Waits for the processes, and gathers those that have ended."""
        advance([launch for _, launch in self._running.values()], seconds)
        found = []
        for number, (_, launch) in list(self._running.items()):
            if launch.over:
                try:
                    found.append(self._ended(number, launch))
                finally:
                    launch.close()
                    del self._running[number]
        return found

    def _ended(self, number: int, launch: Launch) -> Ended:
        try:
            status = launch.result().status
        except GrappeError as error:
            if launch.killed:
                return Ended(number=number, how="killed", reason=KILLED)
            if isinstance(error, OF_THE_MACHINE) or type(error) is UsageError:
                return Ended(number=number, how="error", error=error)
            return Ended(number=number, how="failed", reason=line(error))
        if status != "interrupted":
            return Ended(number=number, how="trained")
        if self._limited or self.stopping:
            return Ended(number=number, how="stopped")
        return Ended(number=number, how="killed", reason="it was interrupted")

    def interrupt(self) -> None:
        """Stops the trials at a checkpoint."""
        for process in self._processes:
            process.signal(signal.SIGTERM)


def line(error: GrappeError) -> str:
    """An error's first line."""
    name = type(error).__name__
    return f"{name}: {str(error).partition(chr(10))[0]}"
