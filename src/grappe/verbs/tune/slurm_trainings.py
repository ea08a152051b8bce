"""Slurm trainings: trains each trial as a Slurm job, which lives on without this process and is found again."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import re
import time
from pathlib import Path

from grappe import errors
from grappe.errors import EXIT_INTERRUPTED, EXIT_OK, GrappeError, RunError, UsageError
from grappe.launch import files
from grappe.launch.files import IN_PART
from grappe.launch.signals import SignalForwarding
from grappe.sites import slurm
from grappe.sites.slurm import Entry, SlurmError
from grappe.training.options import option_words
from grappe.training.request import Request
from grappe.verbs import jobs
from grappe.verbs.submission import TRAIN, JobOptions, Submission
from grappe.verbs.submit import submit
from grappe.verbs.tune.local_trainings import KILLED, OF_THE_MACHINE
from grappe.verbs.tune.study import run_folder
from grappe.verbs.tune.trainings import Busy, Ended

SLICE_SECONDS = 0.2
SIGNALLED = 128
LATER = (
    "maximum number of jobs",
    "contact slurm controller",
    "timed out",
    "temporarily",
    "no answer",
    "try again",
)
"""What sbatch says when it takes no job now, and may take one later."""
LIMITS = re.compile(r"\b(?:qos|assoc|maxsubmit)\w+", re.ASCII)
"""The limit that a job would break, as Slurm names it."""
POLICY = "violates accounting/qos policy"
"""What sbatch says of too many jobs, and of a job that is too large or too long for ever."""
GONE = ("COMPLETING", *slurm.ENDED)
"""States of jobs in the queue that train nothing any more; one that requeues itself comes back from the first."""
LONGEST_REASON = 300


@dataclasses.dataclass
class Placed:
    """A trial's job."""

    job: str
    run: Path
    missed: float = 0.0
    """Time at which the job was first not in the queue any more; 0.0: it is."""


class SlurmTrainings:
    """Trains each trial as a job; at most `parallel` are in the queue.

    A job is found by its name, which is the study's and the trial's: also one whose submission this process, or one
    that was killed before it, could not record. Of two jobs of one name Slurm lets the second wait for the first.

    Args:
        study: the study's folder.
        query_every: seconds between queries to Slurm.
    """

    def __init__(
        self,
        study: Path,
        options: JobOptions,
        *,
        parallel: int,
        query_every: float = jobs.QUERY_SECONDS,
    ) -> None:
        self._study = study = study.resolve()  # one study has one name, by whatever link
        key = hashlib.sha256(str(study).encode()).hexdigest()[:8]
        self._prefix = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', study.name)[:40]}-{key}-"
        self._options, self._parallel, self._every = options, parallel, query_every
        self._signals = SignalForwarding([], saves=True)
        self._placed: dict[int, Placed] = {}
        self._queue: dict[int, Entry] = {}
        self._queried = self._read = 0.0
        self._full: tuple[float, str] = (0.0, "")
        self._leaving = False
        self.notes = ""

    def __enter__(self) -> SlurmTrainings:
        self._query()
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.over = True
        self._signals.__exit__(*error)  # type: ignore[arg-type]

    @property
    def running(self) -> frozenset[int]:
        """The trials that have a job, which may pend."""
        return frozenset(self._placed)

    @property
    def stopping(self) -> bool:
        """True if a signal has come."""
        return self._signals.received

    def interrupt(self) -> None:
        """Leaves the jobs to themselves: the next coordinator finds them."""
        self._leaving = True

    def start(self, number: int, request: Request) -> None:
        """Takes the job that the trial has, or submits one."""
        assert request.run is not None
        entry = self._queue.get(number)
        if entry is not None and not self._over(number, entry):
            job = _id(entry)
            if job not in (str(one["job"]) for one in jobs.submitted(request.run)):
                with contextlib.suppress(OSError):  # a folder that is gone: the job itself will say so
                    jobs.record_job(request.run, job, self._options.site or "", "")
            self._placed[number] = Placed(job, request.run)
            return
        others = [one for one in self._queue if one not in self._placed]
        if len(self._placed) + len(others) >= self._parallel:
            raise Busy(f"{len(others)} jobs of earlier trials are in the queue still")
        until, why = self._full
        if time.monotonic() < until:
            raise Busy(why)
        try:
            [made] = submit(self._submission(number, request))
        except SlurmError as error:
            said = str(error)
            if not _may_pass(said, queued=bool(self._queue or self._placed)):
                raise
            why = f"sbatch takes no more jobs now: {said.partition(chr(10))[0]}"
            self._full = (time.monotonic() + self._every, why)
            raise Busy(why) from error
        self._placed[number] = Placed(made.job, request.run)

    def _submission(self, number: int, request: Request) -> Submission:
        assert request.run is not None
        fields = tuple(f"{name}={text}" for name, text in request.task.texts.items())
        waits = ",".join(filter(None, [self._options.dependency, "singleton"]))
        return Submission(
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

    def look(self, seconds: float) -> list[Ended]:
        """Reads the runs' folders each second, and asks Slurm each minute."""
        until = time.monotonic() + seconds
        while not (self.stopping or self._leaving):
            now = time.monotonic()
            if now - self._queried >= self._every:
                try:
                    self._query()
                except SlurmError as error:
                    self.notes = f"Slurm does not answer: {str(error).partition(chr(10))[0]}"
            if now - self._read >= jobs.FILE_SECONDS:
                self._read = now
                if found := [one for number in list(self._placed) if (one := self._ended(number))]:
                    for one in found:
                        del self._placed[one.number]
                        self._queue.pop(one.number, None)
                    return found
            if now >= until:
                return []
            time.sleep(SLICE_SECONDS)
        left, self._placed = list(self._placed), {}
        return [Ended(number=number, how="stopped") for number in left]

    def _query(self) -> None:
        """Asks Slurm for the study's jobs: one query, whatever their number. Of two of one trial, one is cancelled."""
        self._queried = time.monotonic()
        entries = [one for one in slurm.queue() if one.name.startswith(self._prefix)]
        there = {_id(one) for one in entries}
        found = collections.defaultdict(list)
        for one in sorted(entries, key=lambda one: int(_id(one))):
            number = one.name.removeprefix(self._prefix)
            if number.isascii() and number.isdecimal() and not self._over(int(number), one):
                found[int(number)].append(one)
        placed = {number: one.job for number, one in self._placed.items()}
        self._queue = {
            number: next((one for one in several if _id(one) == placed.get(number)), several[0])
            for number, several in found.items()
        }
        for placing in self._placed.values():
            placing.missed = 0.0 if placing.job in there else placing.missed or self._queried
        self.notes = _pending(list(self._queue.values()))
        for number, several in found.items():
            slurm.cancel([_id(one) for one in several if one is not self._queue[number]])

    def _over(self, number: int, entry: Entry) -> bool:
        """Returns whether a job that is in the queue still has ended."""
        end = run_folder(self._study, number) / "logs" / f"job-{_id(entry)}.end"
        return entry.state in GONE or jobs.written_code(end) is not None

    def _ended(self, number: int) -> Ended | None:
        """Returns how a trial's job has ended; None: it has not."""
        placed = self._placed[number]
        code = jobs.written_code(placed.run / "logs" / f"job-{placed.job}.end")
        if code is not None:
            return self._by_code(number, placed, code)
        if not placed.missed:
            return None
        end = slurm.ended(placed.job)
        if end is None and time.monotonic() - placed.missed <= min(jobs.GRACE_SECONDS, 2 * self._every):
            return None
        # The folder may be behind on a network's file system; and a job may end between two questions.
        code = jobs.written_code(placed.run / "logs" / f"job-{placed.job}.end")
        if code is not None:
            return self._by_code(number, placed, code)
        return self._by_slurm(number, placed, end)

    def _by_code(self, number: int, placed: Placed, code: int) -> Ended:
        if code == EXIT_OK:
            return Ended(number=number, how="trained")
        job = f"its job {placed.job} ended with exit code {code}"
        if code == EXIT_INTERRUPTED or code > SIGNALLED:
            return Ended(number=number, how="killed", reason=job)
        kind, message, killed = _failure(placed)
        if killed:
            return Ended(number=number, how="killed", reason=KILLED)
        if not kind:
            return Ended(number=number, how="failed", reason=f"{job}: grappe logs {placed.run}")
        if issubclass(kind, OF_THE_MACHINE) or kind is UsageError:
            return Ended(
                number=number, how="error", error=kind(f"job {placed.job} of {placed.run}: {message}")
            )
        return Ended(number=number, how="failed", reason=f"{kind.__name__}: {message}"[:LONGEST_REASON])

    def _by_slurm(self, number: int, placed: Placed, end: slurm.End | None) -> Ended:
        state = end.state if end is not None else "GONE"
        began = files.kind(placed.run / "logs" / f"job-{placed.job}.out")
        if state == "CANCELLED" and not began:
            return Ended(
                number=number, how="failed", reason=f"its job {placed.job} was cancelled before it began"
            )
        if state == "OUT_OF_MEMORY":
            return Ended(
                number=number, how="failed", reason=f"OutOfMemory: its job {placed.job} took more than --mem"
            )
        if state == "DEADLINE":
            return Ended(number=number, how="failed", reason=f"its job {placed.job} could not begin in time")
        return Ended(number=number, how="killed", reason=f"its job {placed.job} ended as {state}")


def _id(entry: Entry) -> str:
    """A job's number, without that of its place in an array."""
    return entry.job.partition("_")[0]


def _may_pass(refusal: str, *, queued: bool) -> bool:
    """Returns whether sbatch may take later what it refuses now.

    Args:
        queued: whether it took jobs of the same size and length before, that are in the queue still.
    """
    said = refusal.lower()
    if any(words in said for words in LATER):
        return True
    if limits := LIMITS.findall(said):
        return all("submit" in one for one in limits)
    return queued and POLICY in said


def _pending(entries: list[Entry]) -> str:
    """The reasons why jobs pend, and how many do for each."""
    reasons = collections.Counter(one.reason for one in entries if one.state == "PENDING")
    if not reasons:
        return ""
    return "jobs pend: " + ", ".join(f"{count} ({reason})" for reason, count in sorted(reasons.items()))


def _failure(placed: Placed) -> tuple[type[GrappeError] | None, str, bool]:
    """The error that a job's process has left: its class, its first line, and whether it was a kill."""
    try:
        found = json.loads(files.read_text(placed.run / "logs" / f"job-{placed.job}.why", IN_PART))
        kind, message = getattr(errors, str(found["error"]), None), str(found["message"])
        killed = found.get("killed") is True
    except (OSError, RunError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, "", False
    known = isinstance(kind, type) and issubclass(kind, GrappeError)
    return (kind if known else None), message.partition("\n")[0], killed
