"""Trainings: trains the trials of a coordinator in processes of this machine, or each as a Slurm job."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from grappe import errors
from grappe.checkpoint.lease import Lease
from grappe.errors import DataError, GrappeError, RunError, UsageError
from grappe.launch import files
from grappe.launch.local import Launch, advance
from grappe.launch.mps import DEVICES
from grappe.launch.signals import SignalForwarding
from grappe.plan import Plan
from grappe.sites import slurm
from grappe.sites.sbatch import TRAIN, JobOptions
from grappe.training.options import option_words
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.verbs.submit import jobs
from grappe.verbs.submit.resources import Submission
from grappe.verbs.submit.submit import submit
from grappe.verbs.tune.study import run_folder

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
        plan, worker = request.plan, "grappe.training.worker:worker"
        variables = gpu_variables(plan, place, self._gpus, self._gpus_per_place)
        launch = Launch(worker, request, plan.processes, self._signals, variables)
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


SLICE_SECONDS = 0.2
SIGNALLED = 128
RETRYABLE = re.compile("maximum number of jobs|contact slurm controller|timed out|temporarily|no answer|try again")
"""Words of sbatch when it takes no job now, and may take one later."""
LIMIT_NAMES = re.compile(r"\b(?:qos|assoc|maxsubmit)\w+", re.ASCII)
"""The limit that a job would break, as Slurm names it."""
POLICY_REFUSAL = "violates accounting/qos policy"
"""Words of sbatch for too many jobs, and for a job that is too large or too long for ever."""
ENDED_STATES = ("COMPLETING", *slurm.ENDED)
"""States of jobs in the queue that train nothing any more; one that requeues itself comes back from the first."""
LONGEST_REASON = 300


@dataclasses.dataclass
class TrialJob:
    """A trial's job."""

    id: str
    run: Path
    missing_since: float = 0.0
    """Time at which the job was first not in the queue any more; 0.0: it is there."""

    def exit_code(self) -> int | None:
        """The exit code that the job has written; None: it has not ended, or was killed."""
        return jobs.written_code(self.run / "logs" / f"job-{self.id}.end")


class SlurmTrainings(Trainings):
    """Trains each trial as a job; at most `parallel` are in the queue.

    A job is recognised by its name, which is made of the study's and the trial's: so also a job whose submission this
    process, or one that was killed before it, could not record. Of two jobs of one name Slurm lets the second wait for
    the first.

    Args:
        study: the study's folder.
        query_every: seconds between queries to Slurm.
    """

    def __init__(
        self, study: Path, options: JobOptions, *, parallel: int, query_every: float = jobs.QUERY_SECONDS
    ) -> None:
        super().__init__()
        self._study = study = study.resolve()  # one study has one name, by whatever link
        key = hashlib.sha256(str(study).encode()).hexdigest()[:8]
        self._prefix = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', study.name)[:40]}-{key}-"
        self._options, self._parallel, self._every = options, parallel, query_every
        self._jobs: dict[int, TrialJob] = {}
        self._queue: dict[int, slurm.Entry] = {}
        self._queried = self._read = 0.0
        self._refused_until, self._refusal = 0.0, ""
        self._leaving = False

    def __enter__(self) -> Self:
        self._query()
        return super().__enter__()

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._jobs)  # which may pend

    def interrupt(self) -> None:
        self._leaving = True  # the jobs stay: the next coordinator finds them

    def start(self, number: int, request: Request) -> None:
        assert request.run is not None
        entry = self._queue.get(number)  # the job that the trial has is taken over
        if entry is not None and not self._over(number, entry):
            job = _id(entry)
            if job not in (str(record["job"]) for record in jobs.submitted(request.run)):
                with contextlib.suppress(OSError):  # a folder that is gone: the job itself will say so
                    jobs.record_job(request.run, job, self._options.site or "", "")
            self._jobs[number] = TrialJob(job, request.run)
            return
        others = [queued for queued in self._queue if queued not in self._jobs]
        if len(self._jobs) + len(others) >= self._parallel:
            raise NotNow(f"{len(others)} jobs of earlier trials are in the queue still")
        if time.monotonic() < self._refused_until:
            raise NotNow(self._refusal)
        try:
            fields = tuple(f"{name}={text}" for name, text in request.task.texts.items())
            waits = ",".join(filter(None, [self._options.dependency, "singleton"]))
            submission = Submission(
                command=TRAIN,
                task=request.task.name,
                arguments=(request.task.name, *fields, *option_words(request.options)),
                plans=(str(request.plan),),
                fields=fields,
                run=request.run,
                data=str(request.data),
                options=request.options,
                job=dataclasses.replace(self._options, name=f"{self._prefix}{number:04d}", dependency=waits),
            )
            [submitted] = submit(submission)
        except slurm.SlurmError as error:
            refusal = str(error)
            if not _may_pass(refusal, queued=bool(self._queue or self._jobs)):
                raise
            self._refusal = f"sbatch takes no more jobs now: {refusal.partition(chr(10))[0]}"
            self._refused_until = time.monotonic() + self._every
            raise NotNow(self._refusal) from error
        self._jobs[number] = TrialJob(submitted.job, request.run)

    def poll(self, timeout: float) -> list[TrialEnd]:
        until = time.monotonic() + timeout
        while not (self.stopping or self._leaving):
            now = time.monotonic()
            if now - self._queried >= self._every:
                try:
                    self._query()
                except slurm.SlurmError as error:
                    self.notes = f"Slurm does not answer: {str(error).partition(chr(10))[0]}"
            if now - self._read >= jobs.FILE_SECONDS:
                self._read = now
                ends = [end for number, job in self._jobs.items() if (end := self._end_of(number, job))]
                for end in ends:
                    del self._jobs[end.number]
                    self._queue.pop(end.number, None)
                if ends:
                    return ends
            if now >= until:
                return []
            time.sleep(SLICE_SECONDS)
        left, self._jobs = list(self._jobs), {}
        return [TrialEnd(number=number, outcome="stopped") for number in left]

    def _query(self) -> None:
        """Asks Slurm for the study's jobs: one query for all. If a trial has two jobs, one is cancelled."""
        self._queried = time.monotonic()
        entries = [entry for entry in slurm.queue() if entry.name.startswith(self._prefix)]
        queued = {_id(entry) for entry in entries}
        by_trial = collections.defaultdict(list)
        for entry in sorted(entries, key=lambda entry: int(_id(entry))):
            number = entry.name.removeprefix(self._prefix)
            if number.isascii() and number.isdecimal() and not self._over(int(number), entry):
                by_trial[int(number)].append(entry)
        ids = {number: job.id for number, job in self._jobs.items()}
        self._queue = {
            number: next((entry for entry in several if _id(entry) == ids.get(number)), several[0])
            for number, several in by_trial.items()
        }
        for job in self._jobs.values():
            job.missing_since = 0.0 if job.id in queued else job.missing_since or self._queried
        reasons = collections.Counter(entry.reason for entry in self._queue.values() if entry.state == "PENDING")
        counts = ", ".join(f"{count} ({reason})" for reason, count in sorted(reasons.items()))
        self.notes = f"jobs are pending: {counts}" if counts else ""
        for number, several in by_trial.items():
            slurm.cancel([_id(entry) for entry in several if entry is not self._queue[number]])

    def _over(self, number: int, entry: slurm.Entry) -> bool:
        """Returns whether a job that is in the queue still has ended."""
        job = TrialJob(_id(entry), run_folder(self._study, number))
        return entry.state in ENDED_STATES or job.exit_code() is not None

    def _end_of(self, number: int, job: TrialJob) -> TrialEnd | None:
        """Returns how a trial's job has ended; None: it has not."""
        code, end = job.exit_code(), None
        if code is None:
            if not job.missing_since:
                return None
            end = slurm.ended(job.id)
            grace = min(jobs.GRACE_SECONDS, 2 * self._every)
            if end is None and time.monotonic() - job.missing_since <= grace:
                return None
            # The folder may lag on a network's file system; and a job may end between two questions.
            code = job.exit_code()
        if code is None:
            state = end.state if end is not None else "GONE"
            reasons = {
                "OUT_OF_MEMORY": f"OutOfMemory: its job {job.id} took more than --mem",
                "DEADLINE": f"its job {job.id} could not begin in time",
            }
            if not files.kind(job.run / "logs" / f"job-{job.id}.out"):
                reasons["CANCELLED"] = f"its job {job.id} was cancelled before it began"
            if state in reasons:
                return TrialEnd(number=number, outcome="failed", reason=reasons[state])
            return TrialEnd(number=number, outcome="killed", reason=f"its job {job.id} ended as {state}")
        return _end_by_code(number, job, code)


def _end_by_code(number: int, job: TrialJob, code: int) -> TrialEnd:
    if code == errors.EXIT_OK:
        return TrialEnd(number=number, outcome="trained")
    ended = f"its job {job.id} ended with exit code {code}"
    if code == errors.EXIT_INTERRUPTED or code > SIGNALLED:
        return TrialEnd(number=number, outcome="killed", reason=ended)
    try:  # the error that the job's process has left
        record = json.loads(files.read_text(job.run / "logs" / f"job-{job.id}.why", files.IN_PART))
        kind, message = getattr(errors, str(record["error"]), None), str(record["message"])
        killed = record.get("killed") is True
    except (OSError, errors.RunError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kind, message, killed = None, "", False
    if killed:
        return TrialEnd(number=number, outcome="killed", reason=KILLED)
    if not (isinstance(kind, type) and issubclass(kind, errors.GrappeError)):
        return TrialEnd(number=number, outcome="failed", reason=f"{ended}: grappe logs {job.run}")
    message = message.partition("\n")[0]
    if issubclass(kind, OF_THE_MACHINE) or kind is errors.UsageError:
        error = kind(f"job {job.id} of {job.run}: {message}")
        return TrialEnd(number=number, outcome="error", error=error)
    return TrialEnd(number=number, outcome="failed", reason=f"{kind.__name__}: {message}"[:LONGEST_REASON])


def _id(entry: slurm.Entry) -> str:
    """A job's number, without its place in an array."""
    return entry.job.partition("_")[0]


def _may_pass(refusal: str, *, queued: bool) -> bool:
    """Returns whether sbatch may take later what it refuses now.

    Args:
        queued: whether it took jobs of the same size and length before, that are in the queue still.
    """
    refusal = refusal.lower()
    if RETRYABLE.search(refusal):
        return True
    if limits := LIMIT_NAMES.findall(refusal):
        return all("submit" in limit for limit in limits)
    return queued and POLICY_REFUSAL in refusal
