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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from grappe import errors
from grappe.checkpoint.lease import Lease
from grappe.contrib.slurm import jobs, slurm
from grappe.contrib.slurm.array import Array
from grappe.contrib.slurm.resources import Submission
from grappe.contrib.slurm.submit import submit_all
from grappe.contrib.tune.study import run_folder
from grappe.errors import DataError, GrappeError, RunError, UsageError
from grappe.launch import files
from grappe.launch.local import Launch, advance
from grappe.launch.mps import DEVICES
from grappe.launch.signals import SignalForwarding
from grappe.plan import Plan
from grappe.sites.sbatch import TRAIN, JobOptions
from grappe.training.options import option_words
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.words import first_line

OF_THE_MACHINE = (RunError, DataError)
"""Errors of the machine, not of a trial's fields: the study stops, and resumes when you start it again."""
KILLED = "it was killed (by SIGKILL, as the system does when memory runs out)"
LONGEST_REASON = 300


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


def failure(error: GrappeError) -> str:
    """The reason of a trial that failed by an error."""
    return f"{type(error).__name__}: {first_line(error)}"[:LONGEST_REASON]


def ended_by(number: int, error: GrappeError, where: str = "") -> TrialEnd:
    """The end of a training by an error; a class derived from UsageError is of the trial's fields."""
    if isinstance(error, OF_THE_MACHINE) or type(error) is UsageError:
        return TrialEnd(number=number, outcome="error", error=type(error)(f"{where}{error}") if where else error)
    return TrialEnd(number=number, outcome="failed", reason=failure(error))


class LocalTrainings:
    """Trains at most `parallel` trials at a time in processes of this machine, which end with this one.

    Args:
        limited: whether the trainings have a time limit.
        plans: the plans that trials may have.

    Attributes:
        signals: this command's, which are forwarded to the processes.
        notes: for the user, about the trainings now; "": nothing.
    """

    notes = ""

    def __init__(self, *, parallel: int, limited: bool, plans: Sequence[Plan]) -> None:
        self.signals = SignalForwarding(saves=True)
        self._parallel, self._gpus_per_place = parallel, max(map(gpus_needed, plans))
        self._limited = limited or "SLURM_JOB_END_TIME" in os.environ
        self._running: dict[int, tuple[int, Launch]] = {}
        self._gpus = visible_gpus()

    @property
    def running(self) -> frozenset[int]:
        """The trials that are being trained, by number."""
        return frozenset(self._running)

    def start(self, number: int, request: Request) -> None:
        """Starts a trial's training.

        Raises:
            NotNow: it can be started later.
            GrappeError: it cannot be started here, whatever the trial's fields.
        """
        folder = request.run
        assert folder is not None
        if Run.is_run(folder) and (who := Lease(folder).held_by()):
            raise NotNow(f"{folder.name} is being written by {who}")
        place = min(set(range(self._parallel)) - {place for place, _ in self._running.values()})
        variables = gpu_variables(request.plan, place, self._gpus, self._gpus_per_place)
        launch = Launch("grappe.training.worker:worker", request, request.plan.processes, self.signals, variables)
        self._running[number] = (place, launch)
        launch.start()

    def poll(self, timeout: float) -> list[TrialEnd]:
        """Waits until something happens, but at most `timeout` seconds; returns the trainings that have ended."""
        advance([launch for _, launch in self._running.values()], timeout)
        over = [(number, launch) for number, (_, launch) in self._running.items() if launch.over]
        ends = [self._end_of(number, launch) for number, launch in over]
        for number, launch in over:
            launch.close()
            del self._running[number]
        return ends

    def interrupt(self) -> None:
        """Stops the trainings at a checkpoint, if they end with this command."""
        self.signals.send(signal.SIGTERM)

    def close(self) -> None:
        """Ends what still runs, if it ends with this command."""
        for _, launch in self._running.values():
            launch.close()

    def _end_of(self, number: int, launch: Launch) -> TrialEnd:
        try:
            status = launch.result().status
        except GrappeError as error:
            if launch.killed:
                return TrialEnd(number=number, outcome="killed", reason=KILLED)
            return ended_by(number, error)
        if status != "interrupted":
            return TrialEnd(number=number, outcome="trained")
        stopped = self._limited or self.signals.received
        return TrialEnd(number=number, outcome="stopped" if stopped else "killed")


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
RETRYABLE = re.compile("maxsubmit|maximum number of jobs|contact slurm controller|timed out|temporarily|try again")
"""Words of sbatch when it takes no job now, and may take one later."""
ENDED_STATES = ("COMPLETING", *slurm.ENDED)
"""States of jobs in the queue that no longer train; a job that requeues itself leaves the first state for the queue."""


class SlurmTrainings:
    """Trains each trial as a job; at most `parallel` are in the queue, or run at a time as tasks of an array.

    A job is recognised by its name, which is made of the study's and the trial's: so also a job whose submission this
    process, or one that was killed before it, could not record. Of two jobs of one name Slurm lets the second wait for
    the first.

    Args:
        study: the study's folder.

    Attributes and methods are those of LocalTrainings.
    """

    def __init__(self, study: Path, options: JobOptions, *, parallel: int) -> None:
        self.signals = SignalForwarding(saves=True)
        self._study = study = study.resolve()  # one study has one name, by whatever link
        key = hashlib.sha256(str(study).encode()).hexdigest()[:8]
        self._prefix = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', study.name)[:40]}-{key}-"
        self._name = re.compile(re.escape(self._prefix) + r"(?:(\d{1,9}) .*|array \d+_(\d+))", re.ASCII)
        self._options, self._parallel = options, parallel
        self._jobs: dict[int, str] = {}
        self._drawn: dict[int, Request] = {}
        self._missing: dict[int, float] = {}
        self._queue: dict[int, slurm.Entry] = {}
        self._queried = self._read = 0.0
        self._leaving = False
        self._query()

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._jobs.keys() | self._drawn.keys())  # which may pend

    def interrupt(self) -> None:
        self._leaving = True

    def close(self) -> None:
        pass  # the jobs stay: the next coordinator finds them

    def start(self, number: int, request: Request) -> None:
        assert request.run is not None
        entry = self._queue.get(number)  # the job that the trial has is taken over
        if entry is not None and not self._over(number, entry):
            job = _id(entry)
            if job not in (str(record["job"]) for record in jobs.submitted(request.run)):
                with contextlib.suppress(OSError):  # a folder that is gone: the job itself will say so
                    jobs.record_job(request.run, job, self._options.site or "", "")
            self._jobs[number] = job
            return
        busy = self._jobs.keys() | self._queue.keys()
        if not self._options.array and len(busy) >= self._parallel:
            raise NotNow(f"{len(busy) - len(self._jobs)} jobs of earlier trials are in the queue still")
        if self._refusal:
            raise NotNow(self._refusal)
        self._drawn[number] = request
        if not self._options.array:  # an array has all those that are drawn in one round
            self._submit()

    def _submit(self) -> None:
        """Submits the drawn trial's job, or the array of several; NotNow: they are to be drawn again."""
        drawn, self._drawn = self._drawn, {}
        number, request = next(iter(drawn.items()))
        texts = {each: request.task.texts for each, request in drawn.items()}
        words = {each: tuple(f"{name}={text}" for name, text in fields.items()) for each, fields in texts.items()}
        array = Array(ids=tuple(sorted(drawn)), at_once=self._parallel, words=words) if self._options.array else None
        fields, name = ((), "array") if array else (words[number], f"{number:04d}")
        waits = ",".join(filter(None, [self._options.dependency, "singleton"]))
        submission = Submission(
            command=TRAIN,
            task=request.task.name,
            arguments=(request.task.name, *fields, *option_words(request.options)),
            plans=(str(request.plan),),
            fields=fields,
            run=self._study if array else request.run,
            data=str(request.data),
            options=request.options,
            job=dataclasses.replace(self._options, name=f"{self._prefix}{name}", dependency=waits, array=None),
            array=array,
        )
        try:
            [submitted] = submit_all([submission])
        except slurm.SlurmError as error:
            # It took jobs of the same size and length before, if there are any.
            if not (self._queue or self._jobs or RETRYABLE.search(str(error).lower())):
                raise
            self._refusal = f"sbatch takes no more jobs now: {first_line(error)}"
            raise NotNow(self._refusal) from error
        self._jobs |= {each: f"{submitted.job}_{each}" if array else submitted.job for each in drawn}

    def poll(self, timeout: float) -> list[TrialEnd]:
        until = time.monotonic() + timeout
        if self._drawn and not self.signals.received:
            with contextlib.suppress(NotNow):
                self._submit()
        while not (self.signals.received or self._leaving):
            now = time.monotonic()
            if now - self._queried >= jobs.QUERY_SECONDS:
                try:
                    self._query()
                except slurm.SlurmError as error:
                    self.notes = f"Slurm does not answer: {first_line(error)}"
            if now - self._read >= jobs.FILE_SECONDS:
                self._read = now
                ends = [end for number, job in self._jobs.items() if (end := self._end_of(number, job))]
                for end in ends:
                    for of_job in (self._jobs, self._missing, self._queue):
                        of_job.pop(end.number, None)
                if ends:
                    return ends
            if now >= until:
                return []
            time.sleep(SLICE_SECONDS)
        left, self._jobs, self._drawn = list(self.running), {}, {}
        return [TrialEnd(number=number, outcome="stopped") for number in left]

    def _query(self) -> None:
        """Asks Slurm for the study's jobs: one query for all. If a trial has two jobs, one is cancelled."""
        self._queried, self._refusal = time.monotonic(), ""  # sbatch is asked again, too
        named = [(self._name.fullmatch(f"{entry.name} {entry.job}"), entry) for entry in slurm.queue(expand=True)]
        entries = [(int(match[1] or match[2]), entry) for match, entry in named if match]
        queued, followed = {_id(entry) for _, entry in entries}, self._jobs.values()
        missing = [number for number, job in self._jobs.items() if job not in queued]
        self._missing = {number: self._missing.get(number, self._queried) for number in missing}
        self._queue.clear()
        for number, entry in sorted(
            entries, key=lambda pair: (_id(pair[1]) not in followed, int(pair[1].job.partition("_")[0]))
        ):
            if not self._over(number, entry) and self._queue.setdefault(number, entry) is not entry:
                slurm.cancel([_id(entry)])
        reasons = collections.Counter(entry.reason for entry in self._queue.values() if entry.state == "PENDING")
        counts = ", ".join(f"{count} ({reason})" for reason, count in sorted(reasons.items()))
        self.notes = f"jobs are pending: {counts}" if counts else ""

    def _over(self, number: int, entry: slurm.Entry) -> bool:
        """Returns whether a job that is in the queue still has ended."""
        return entry.state in ENDED_STATES or self._code(number, _id(entry)) is not None

    def _logs(self, number: int) -> Path:
        return run_folder(self._study, number) / "logs"

    def _code(self, number: int, job: str) -> int | None:
        """The exit code that a job has written; None: it has not ended, or was killed."""
        return jobs.written_code(self._logs(number) / f"job-{job}.end")

    def _end_of(self, number: int, job: str) -> TrialEnd | None:
        """Returns how a trial's job has ended; None: it has not."""
        code, state = self._code(number, job), ""
        if code is None and number in self._missing:
            end, patience = slurm.ended(job), min(jobs.GRACE_SECONDS, 2 * jobs.QUERY_SECONDS)
            gone = time.monotonic() - self._missing[number] > patience
            state = end.state if end is not None else "GONE" if gone else ""
            # The folder may lag on a network's file system; and a job may end between two questions.
            code = self._code(number, job) if state else None
        if code is not None:
            return self._end_by_code(number, job, code)
        reasons = {
            "OUT_OF_MEMORY": f"OutOfMemory: its job {job} took more than --mem",
            "DEADLINE": f"its job {job} could not begin in time",
        }
        if not files.kind(self._logs(number) / f"job-{job}.out"):
            reasons["CANCELLED"] = f"its job {job} was cancelled before it began"
        if state in reasons:
            return TrialEnd(number=number, outcome="failed", reason=reasons[state])
        return TrialEnd(number=number, outcome="killed", reason=f"its job {job} ended as {state}") if state else None

    def _end_by_code(self, number: int, job: str, code: int) -> TrialEnd:
        if code == errors.EXIT_OK:
            return TrialEnd(number=number, outcome="trained")
        ended, run = f"its job {job} ended with exit code {code}", run_folder(self._study, number)
        if code == errors.EXIT_INTERRUPTED or code > SIGNALLED:
            return TrialEnd(number=number, outcome="killed", reason=ended)
        kind, message, killed = None, "", False
        with contextlib.suppress(OSError, RunError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # The error that the job's process has left.
            record = json.loads(files.read_text(self._logs(number) / f"job-{job}.why", files.IN_PART))
            kind, message = getattr(errors, record["error"], None), first_line(record["message"])
            killed = record.get("killed") is True
        if killed:
            return TrialEnd(number=number, outcome="killed", reason=KILLED)
        if not (isinstance(kind, type) and issubclass(kind, GrappeError)):
            return TrialEnd(number=number, outcome="failed", reason=f"{ended}: grappe logs {run}")
        return ended_by(number, kind(message), f"job {job} of {run}: ")


def _id(entry: slurm.Entry) -> str:
    """A job's number, without its place in a chain."""
    return entry.job if entry.name.endswith("-array") else entry.job.partition("_")[0]
