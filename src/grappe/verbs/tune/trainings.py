"""Trainings: the interface by which a coordinator trains its trials, and trainings in processes of this machine."""

from __future__ import annotations

import dataclasses
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from grappe.checkpoint.lease import Lease
from grappe.errors import DataError, GrappeError, RunError, UsageError
from grappe.launch.local import Launch, advance
from grappe.launch.mps import DEVICES
from grappe.launch.signals import SignalForwarding
from grappe.plan import Plan
from grappe.training.request import Request
from grappe.training.run import Run

OF_THE_MACHINE = (RunError, DataError)
"""Errors of the machine, not of a trial's fields: the study stops, and goes on from there when it is started again."""
KILLED = "it was killed (by SIGKILL, as the system does when memory runs out)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """The end of a trial's training."""

    number: int
    outcome: Literal["trained", "killed", "stopped", "failed", "error"]
    """trained: as far as it was to be; killed: from outside, or interrupted by somebody else; stopped: at the time
    limit; failed: by its fields; error: by the machine, which stops the study."""
    reason: str = ""
    error: GrappeError | None = None


class NotNow(Exception):
    """A training cannot be started now; the message says why. It is tried again."""


class Trainings(ABC):
    """Trains some trials at a time; a context, in which it sees this command's signals."""

    def __init__(self) -> None:
        self._signals = SignalForwarding(saves=True)
        self.notes = ""
        """Note for the user about the trainings now; "": nothing."""

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.over = True
        self._signals.__exit__(*error)  # type: ignore[arg-type]

    @property
    def stopping(self) -> bool:
        """True if a signal has come: nothing new is to be started."""
        return self._signals.received

    @property
    @abstractmethod
    def running(self) -> frozenset[int]:
        """The trials that are being trained, by number."""

    @abstractmethod
    def start(self, number: int, request: Request) -> None:
        """Starts a trial's training.

        Raises:
            NotNow: it can be started later.
            GrappeError: it cannot be started here, whatever the trial's fields.
        """

    @abstractmethod
    def poll(self, timeout: float) -> list[TrialEnd]:
        """Waits until something happens, but at most `timeout` seconds; returns the trainings that have ended."""

    @abstractmethod
    def interrupt(self) -> None:
        """Stops the trainings at a checkpoint, if they end with this command."""


class LocalTrainings(Trainings):
    """Trains at most `parallel` trials at a time in processes of this machine, which end with this one.

    Args:
        limited: whether the trainings have a time limit.
        plans: the plans that trials may have.
    """

    def __init__(self, *, parallel: int, limited: bool, plans: Sequence[Plan]) -> None:
        super().__init__()
        self._parallel, self._gpus_per_place = parallel, max(map(gpus_needed, plans))
        self._limited = limited or "SLURM_JOB_END_TIME" in os.environ
        self._running: dict[int, tuple[int, Launch]] = {}
        self._gpus = visible_gpus()

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    def __exit__(self, *error: object) -> None:
        try:
            self._signals.over = True
            for _, launch in self._running.values():
                launch.close()
        finally:
            super().__exit__(*error)

    def start(self, number: int, request: Request) -> None:
        folder = request.run
        assert folder is not None
        if Run.is_run(folder) and (who := Lease(folder).held_by()):
            raise NotNow(f"{folder.name} is being written by {who}")
        place = min(set(range(self._parallel)) - {place for place, _ in self._running.values()})
        launch = Launch(
            "grappe.training.worker:worker",
            request,
            request.plan.processes,
            self._signals,
            gpu_variables(request.plan, place, self._gpus, self._gpus_per_place),
        )
        self._running[number] = (place, launch)
        launch.start()

    def poll(self, timeout: float) -> list[TrialEnd]:
        advance([launch for _, launch in self._running.values()], timeout)
        ends = []
        for number, (_, launch) in list(self._running.items()):
            if launch.over:
                try:
                    ends.append(self._end_of(number, launch))
                finally:
                    launch.close()
                    del self._running[number]
        return ends

    def _end_of(self, number: int, launch: Launch) -> TrialEnd:
        try:
            status = launch.result().status
        except GrappeError as error:
            if launch.killed:
                return TrialEnd(number=number, outcome="killed", reason=KILLED)
            if isinstance(error, OF_THE_MACHINE) or type(error) is UsageError:
                return TrialEnd(number=number, outcome="error", error=error)
            return TrialEnd(number=number, outcome="failed", reason=first_line(error))
        if status != "interrupted":
            return TrialEnd(number=number, outcome="trained")
        if self._limited or self.stopping:
            return TrialEnd(number=number, outcome="stopped")
        return TrialEnd(number=number, outcome="killed", reason="it was interrupted")

    def interrupt(self) -> None:
        self._signals.send(signal.SIGTERM)


def first_line(error: GrappeError) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if DEVICES in environment:
        return [name.strip() for name in environment[DEVICES].split(",") if name.strip()]
    return [str(index) for index in range(len(list(devices.glob("nvidia[0-9]*"))))]


def gpus_needed(plan: Plan) -> int:
    """The number of GPUs that a trial takes."""
    return 0 if plan.device == "cpu" else -(-plan.processes // plan.per_device)


def gpu_variables(plan: Plan, place: int, gpus: Sequence[str], gpus_per_place: int) -> dict[str, str]:
    """The variables that give a trial's processes GPUs of their own, as far as there are enough.

    Args:
        place: of the trial, among those that run at a time, from 0.
        gpus_per_place: GPUs that the largest of the study's trials takes.
    """
    needed = gpus_needed(plan)
    size = max(needed, gpus_per_place)
    places = len(gpus) // max(size, 1)
    if not needed or places < 2:
        return {}
    first = place % places * size
    return {DEVICES: ",".join(gpus[first : first + needed])}
