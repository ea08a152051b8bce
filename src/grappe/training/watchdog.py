"""Watchdog: detects that a training makes no progress, and names the process that blocks the others.

Each process has a watchdog thread. Without progress for too long, the watchdog writes this process's activity, and
the stacks of its threads, next to the run's logs. A process that sees another's report adds its own. Then the lowest
rank that answered reads all reports, and ends with an error that names the process at fault.

The main thread's activity is explicit state: the phase, whether the thread waits for other processes, whether
the thread writes to the user's terminal (docs/decisions/training.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.autograd
import torch.distributed

from grappe.errors import EXIT_INTERRUPTED, GrappeError, Idle, ProcessDied, RunError, user_line
from grappe.launch import files
from grappe.launch.child import end_now, fail
from grappe.launch.files import IN_PART
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import StopSignal
from grappe.launch.terminal import UserStream, complain
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, CHECKPOINT, COMMUNICATION, EVALUATION, FORWARD
from grappe.words import host_name

T = TypeVar("T")

FIRST_SECONDS = 900.0  # of a kind of work done for the first time: torch.compile may take minutes
SAVING_SECONDS = 900.0  # a file system may be busy with others' files
LEAST_SECONDS = 60.0
IDLE_SECONDS = 300.0  # without any work of a script's processes
TIMES_LONGEST = 20.0
TICK_SECONDS = 1.0
GRACE_SECONDS = 5.0
LAST_LINES = 8
STACKS = "\nThe stacks of all processes: "
WORK = {EVALUATION: "evaluation", CHECKPOINT: "save"}  # by phase; any other is a part of a step
DEBUGGERS = re.compile(r"\b(bdb|pdb)\.py$|pydevd")  # files of which a stopped program's stack has one
TORCH_WAITS = tuple(Path(package.__file__).parent for package in (torch.distributed, torch.autograd))
"""Folders of torch's packages in which a process waits for others, where nothing says so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standstill:
    """A process's report when the training makes no progress."""

    rank: int
    host: str
    phase: str
    """"step", "evaluation" or "save"."""
    step: int
    """Number of steps done."""
    where: str
    """The current line of the main thread: the user's own, if there is one."""
    waits: bool
    """Whether the main thread waits for other processes."""
    excused: bool
    """Whether the main thread waits for the user, at a debugger or a paused terminal, or for a slow pipe."""
    stack: tuple[str, ...]
    """The last lines of the main thread's stack."""


class Watchdog:
    """Thread that detects a stalled training, which counts its progress in `marks`; a step costs four assignments.

    Args:
        folder: the folder of reports, shared by all processes.
        token: identifies this start, so that older reports are ignored.
        limit: seconds without progress that are too long; None: derived from the longest so far.
        end: callback that ends this process with an error for the user.
        phase: returns the main thread's phase, one of profiling.phases.
        writing: returns whether the main thread is writing to the user's terminal now.
    """

    _asks_all = False
    """Whether all must have stood still for as long."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        folder: Path,
        token: str,
        limit: float | None,
        end: Callable[[GrappeError], None],
        phase: Callable[[], int],
        writing: Callable[[], bool],
    ) -> None:
        self._rank, self._size, self._folder, self._token = rank, size, folder, token
        self._limit, self._end, self._phase, self._writing = limit, end, phase, writing
        self.marks = self.step = 0
        """Counted up by one whenever something got done; steps done."""
        self.waiting = False
        """Whether the main thread waits for other processes, outside of what the phase says."""
        self._seen: set[str] = set()
        self._longest, self._steps = 0.0, 1
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._tick = min(TICK_SECONDS, limit / 10) if limit else TICK_SECONDS
        self._grace = min(GRACE_SECONDS, limit / 2) if limit else GRACE_SECONDS

    def start(self, step: int) -> None:
        """Starts the watch: from now on, no progress for too long ends the training."""
        self.step = step
        threading.Thread(target=self._watch, name="grappe-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()

    def counted(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the same items, each of which counts as progress."""
        for item in items:
            self.marks += 1
            yield item

    @contextlib.contextmanager
    def steps_at_once(self, steps: int) -> Iterator[None]:
        """Context of work without marks that takes the time of `steps` steps: the watch runs slower by as much."""
        self._steps = steps
        try:
            yield
        finally:
            self._steps = 1

    def _watch(self) -> None:
        # Seconds are counted in ticks of this thread: while a laptop sleeps, or all processes are stopped,
        # no time passes here either.
        before, silent = self._progress(), 0.0
        while not self._over.wait(self._tick):
            silent += self._tick / self._steps
            now = self._progress()
            if now != before:
                (marks, work), (marks_now, work_now) = before, now
                # Another kind of work alone may be the start's end, before any step.
                if marks_now != marks and work_now == work:
                    self._longest = max(self._longest, silent) if work in self._seen else self._longest
                    self._seen.add(work)
                before, silent = now, 0.0
            late = silent > self.bound()
            asked = not self._asks_all and silent > self._grace and self._others()
            if (late or asked) and self._stands_still(before, silent):
                return
            if late:
                silent = 0.0

    def _progress(self) -> tuple[object, str]:
        """Returns a value that changes with progress: the marks, and the kind of work."""
        return self.marks, WORK.get(self._phase(), "step")

    def bound(self) -> float:
        """Returns the seconds without progress that are too long now."""
        if self._limit is not None:
            return self._limit
        _, work = self._progress()
        least = SAVING_SECONDS if work == "save" else LEAST_SECONDS
        if work not in self._seen:
            least = FIRST_SECONDS
        return max(least, TIMES_LONGEST * self._longest)

    def _stands_still(self, before: tuple[object, str], silent: float) -> bool:
        """Reports a standstill, and ends this process unless there is progress in the meantime."""
        self._report(silent)
        while not self._over.wait(self._grace):
            reports = self._others()
            if self._progress() != before or any(report.excused for report in reports.values()):
                break
            if self._asks_all and len(reports) < self._size:  # another one gets on
                continue
            if min(reports, default=self._rank) >= self._rank:
                error = ProcessDied(sentence(reports, self._size, self._folder, silent))
                error.nodes = against_nodes(reports, self._size)
                self._end(error)
                return True
        with contextlib.suppress(OSError, RunError):
            files.remove(self._path(self._rank), IN_PART)
        return self._over.is_set()

    def _path(self, rank: int) -> Path:
        return self._folder / f"stall-rank-{rank}.txt"

    def _report(self, silent: float) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stack = traceback.extract_stack(frames[self._main]) if self._main in frames else traceback.StackSummary()
        me = self._standstill(stack)
        stacks = [
            f"\nthread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sorted(frames.items(), key=lambda thread: thread[0] != self._main)
        ]
        head = json.dumps({"token": self._token, **dataclasses.asdict(me)})
        words = f"no progress for {silent:.0f} s in {me.phase}, {me.step} steps done\n"
        text = f"{head}\n{words}{''.join(stacks)}"
        # Neither a full disk nor a link must keep a standstill from being ended.
        with contextlib.suppress(OSError, RunError):
            files.replace(self._path(self._rank), text.encode(errors="replace"), IN_PART)

    def _others(self) -> dict[int, Standstill]:
        """Reads the reports of this start's processes, by rank."""
        reports = {}
        for rank in range(self._size):
            try:
                with files.reader(self._path(rank), IN_PART) as stream:
                    entries = json.loads(stream.readline())
                if entries.pop("token") == self._token:
                    reports[rank] = Standstill(**entries)
            except (OSError, RunError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return reports

    def _standstill(self, stack: traceback.StackSummary) -> Standstill:
        _, work = self._progress()
        return Standstill(
            rank=self._rank,
            host=host_name(),
            phase=work,
            step=self.step,
            where=user_line.place_in(stack),
            waits=self._size > 1 and (self.waiting or waits_in(self._phase(), stack)),
            excused=self._writing() or any(DEBUGGERS.search(frame.filename) for frame in stack),
            stack=tuple("".join(traceback.format_list(stack)).splitlines()[-LAST_LINES:]),
        )


class IdleWatchdog(Watchdog):
    """Watchdog whose progress is a phase that ends, or CPU time of a twentieth of the limit, in any process."""

    _asks_all = True

    def _progress(self) -> tuple[object, str]:
        phase_began = Chronometer.newest.since if Chronometer.newest else 0.0
        return (phase_began, int(cpu_seconds() * 20 / (self._limit or 1.0))), "step"


def watch_idle(
    limit: float, process: ProcessRank, folder: Path, *, token: str = "", terminal: UserStream | None = None
) -> None:
    """Begins a watch that saves and ends this start when no process has computed for `limit` seconds.

    A start that does not end within a minute is ended where it is; its last checkpoint is whole.

    Args:
        limit: 0: the watch says which process stands still, after IDLE_SECONDS, and ends nothing.
        folder: of reports, shared by all processes of the start that `token` identifies.
        terminal: the user's; None: standard error is.
    """

    def end(error: GrappeError) -> None:
        if not limit:
            complain(f"grappe: {error}")
            return
        fail(EXIT_INTERRUPTED)  # else the job's script puts the job back into the queue
        complain(f"grappe: --idle: no process has computed for {limit:.0f} s: saving and ending", terminal)
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopSignal):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(min(LEAST_SECONDS, 5 * limit))
        why = str(error).partition(STACKS)[0]  # the folder goes with the start
        ended = Idle(f"{why}\n--idle has ended it: the same run, started again, resumes from its last checkpoint")
        ended.nodes = error.nodes
        end_now(folder, process, ended)

    IdleWatchdog(
        rank=process.rank, size=process.size, folder=folder, token=token, limit=limit or IDLE_SECONDS, end=end,
        phase=lambda: Chronometer.newest.phase if Chronometer.newest else FORWARD, writing=lambda: False,
    ).start(-1)  # fmt: skip


def cpu_seconds(process: str = "self") -> float:
    """Sums up the CPU time of a process and of those that it has started, ended too; off Linux of this one alone."""
    folder = Path("/proc") / process
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        started = [(thread / "children").read_text().split() for thread in (folder / "task").iterdir()]
    except OSError:
        return time.process_time() if process == "self" else 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with those that have ended
    return own + sum(cpu_seconds(number) for numbers in started for number in numbers)


def waits_in(phase: int, stack: traceback.StackSummary) -> bool:
    """Returns whether a main thread in `phase`, at `stack`, waits for other processes."""
    if phase == COMMUNICATION:
        return True
    innermost = stack[-1].filename if stack else ""
    # DDP waits in C++, inside of backward: the innermost line of Python is then ours or torch's.
    if phase == BACKWARD and Path(innermost).is_relative_to(user_line.PACKAGE):
        return True
    return any(Path(innermost).is_relative_to(folder) for folder in TORCH_WAITS)


def sentence(reports: dict[int, Standstill], size: int, folder: Path, silent: float) -> str:
    """Names the process at fault and its activity in a sentence."""
    begin = f"the training has stood still for {silent:.0f} s: "
    end = f"{STACKS}{folder}/stall-rank-*.txt"
    silent_ones = [rank for rank in range(size) if rank not in reports]
    if silent_ones and reports:
        which = ", ".join(map(str, silent_ones))
        waiting = _waiting(next(iter(reports.values())))
        return f"{begin}process {which} of {size} does not answer: it is stopped, dead or cut off; {waiting}{end}"
    if not reports:
        return f"{begin}no process could write why; what it was doing is unknown{end}"
    report = _at_fault(reports)
    if report is None and len({each.where for each in reports.values()}) > 1:
        each = "; ".join(map(_waiting, reports.values()))
        return (
            f"{begin}all {size} processes wait for each other, in different calls: {each}. A layer that "
            "communicates, such as synchronised batch normalisation, must run equally often on each process (or: "
            f"batchnorm=local){end}"
        )
    if report is None:
        waiting = _waiting(next(iter(reports.values())))
        return f"{begin}all {size} processes wait for each other: a message was lost, {waiting}{end}"
    who = f"process {report.rank} of {size} on {report.host}"
    others = "; the others wait for it" if size > 1 else ""
    lines = "".join(f"\n  | {line}" for line in report.stack)
    return f"{begin}{who} makes no progress in {_doing(report)}, at {report.where}{others}{lines}{end}"


def against_nodes(reports: Mapping[int, Standstill], size: int) -> dict[str, str]:
    """Names the node of the process that the others, on other nodes, wait for, with the evidence; else nothing."""
    report = _at_fault(reports) if len(reports) == size else None
    if report is None or len({each.host for each in reports.values()}) == 1:
        return {}
    return {report.host: f"process {report.rank} stood still in {_doing(report)}, at {report.where}"}


def _at_fault(reports: Mapping[int, Standstill]) -> Standstill | None:
    """Returns the report of the process that the others wait for; None where all wait for each other."""
    busy = [report for report in reports.values() if not report.waits]
    if not busy and len({report.step for report in reports.values()}) == 1:
        return None
    return min(busy or reports.values(), key=lambda report: (report.step, report.rank))


def _waiting(report: Standstill) -> str:
    return f"process {report.rank} waits in {_doing(report)}, at {report.where}"


def _doing(report: Standstill) -> str:
    if report.step < 0:
        return "its program"
    return f"step {report.step + 1}" if report.phase == "step" else f"its {report.phase} after step {report.step}"
