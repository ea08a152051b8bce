"""Local launch: starts a plan's processes on this machine, waits for them, and returns process 0's result."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import itertools
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import cloudpickle

from grappe import errors
from grappe.errors.causes import limits_set
from grappe.errors.foreign_text import printable
from grappe.errors.remedies import OTHER_SIZES, remedy
from grappe.errors.user_line import Line, is_users_file
from grappe.launch import child, files
from grappe.launch.files import IN_PART
from grappe.launch.fork import parent_pipe_in_environment
from grappe.launch.openmp import sleeping_threads
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import SIGNALS, SignalForwarding, signals_blocked
from grappe.launch.terminal import complain
from grappe.private_api import check_torch
from grappe.private_api.multiprocessing import PATIENCE_SECONDS, forkserver_exit_code, forkserver_is_running
from grappe.profiling import memory
from grappe.words import first_line, format_bytes, host_name

GRACE_SECONDS = 3.0
MOST_ON_A_CORE = 32  # processes: more only wait for each other, and take a few hundred MB each
PRELOADED = "GRAPPE_PRELOADED"
"""Variable with the modules that the server imports."""
# torch._dynamo: the first optimizer that is made imports it, and all that FSDP2 needs.
OF_TASKS = ("torch._dynamo", "grappe.engines.native", "grappe.training.worker")
TASKS = Path("/proc/self/task")  # a folder for each thread
NAME = "grappe-rank-"
REFUSED = frozenset({1, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS})
"""Exit codes of libraries that got no memory and cannot say so: libgomp's is 1; oneDNN uses the address 0."""
LAST_LINES = 12
MOST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")  # bytes of a socket's name
INNERMOST = 3  # calls that are shown of a crash outside the user's own files
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
UNKNOWN = 255  # exit code
LOST = ("closed by peer", "reset by peer", "Broken pipe", "Horovod has been shut down")


def _warn_of_torch() -> None:
    """Warns once of a torch that was not tested, before processes import it whose messages go to a log."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if caution := check_torch(importlib.metadata.version("torch")):
            complain(caution)


def _check_temporary_folder() -> None:
    """Raises UsageError if TMPDIR is too long for the names of sockets: processes would hang without a message."""
    folder = os.environ.get("TMPDIR", "")
    if len(os.fsencode(folder)) > MOST_TMPDIR and Path(folder).is_dir():
        raise errors.UsageError(
            f"TMPDIR={printable(folder)}: sockets of processes cannot have so long a name: take a folder of at most "
            f"{MOST_TMPDIR} characters, such as /tmp"
        )


def start_server(*modules: str, metrics: bool = True) -> None:
    """Starts the server that processes are forked from, unless it runs: the server imports torch in the background.

    Args:
        modules: what the server imports; none: what tasks need.
        metrics: whether torchmetrics is among that, which takes a second. Else each process that needs it imports it.
    """
    _check_temporary_folder()
    _warn_of_torch()
    multiprocessing.set_forkserver_preload(["grappe.launch.server", "grappe.launch.preload"])
    os.environ[PRELOADED] = " ".join(modules or (*OF_TASKS, *["torchmetrics"] * metrics))
    try:
        # A signal to the whole group must not end the server either.
        with signals_blocked(), without_main(), sleeping_threads(), parent_pipe_in_environment():
            resource_tracker.ensure_running()  # which lifts a part of the mask
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            forkserver.ensure_running()
    finally:
        del os.environ[PRELOADED]


class Launch:
    """The processes of one function, from their start to the result of process 0; several may run side by side.

    The processes are forked from a server that has torch imported and no threads started, so that they start in about
    a second; a single process is forked from this one if this one is as clean. `argument` is pickled by value,
    including classes of a notebook.

    Args:
        function: "package.module:name", called as function(argument, process, rendezvous_folder).
        signals: forwards this command's signals to the processes from their start to `close`.
        environment: variables that these processes get in addition to this one's.
        from_training: whether a process that was launched itself may start them.
    """

    def __init__(
        self,
        function: str,
        argument: Any,
        processes: int,
        signals: SignalForwarding,
        environment: Mapping[str, str] | None = None,
        *,
        from_training: bool = False,
    ) -> None:
        if not from_training and multiprocessing.current_process().name.startswith(NAME):
            raise errors.TaskError(
                "the task's file starts processes itself when it is loaded: put that under "
                'if __name__ == "__main__":, or leave it out'
            )
        _check_temporary_folder()
        self._call, self._count, self._environment = (function, argument), processes, environment or {}
        self._folder = Path(tempfile.mkdtemp(prefix="grappe-"))
        self._signals, self._mine = signals, list[LocalProcess]()
        self._living: dict[Any, LocalProcess] = {}
        self._failed: list[LocalProcess] = []
        self._deadline: float | None = None

    def start(self) -> None:
        """Starts the processes."""
        with sleeping_threads(), _by_value():
            try:
                payload = cloudpickle.dumps((*self._call, {**os.environ, **self._environment}))
            except Exception as error:
                raise errors.TaskError(
                    f"the task cannot be sent to its processes ({type(error).__name__}: {error}): make what "
                    "holds an open file, a lock or a thread inside data() or model(), or put the task in a file: "
                    "grappe.train('task.py')"
                ) from error
        context = _context(self._count)
        secret = secrets.token_hex(32)
        alone = ProcessRank(size=self._count, local_size=self._count, job=self._folder.name, secret=secret)
        for rank in range(self._count):
            process = LocalProcess(dataclasses.replace(alone, rank=rank, local_rank=rank), self._folder)
            self._mine.append(process)
            self._signals.processes.append(process)
            # multiprocessing would start another server, and forget how the first one ended.
            if rank and (ended := server_end(patience=0.0)):
                raise errors.ProcessDied(f"{process.name} could not be started: {ended}")
            # A signal would be lost before the process can save: StopSignal.install lifts the mask.
            with signals_blocked():
                process.start(payload, self._folder, context)
            self._living[process.process.sentinel] = process
            self._signals.catch_up(process)

    @property
    def handles(self) -> list[Any]:
        """Lists objects for multiprocessing.connection.wait."""
        # A report may be larger than its pipe holds, so it is read while its process still writes it.
        return [*self._living, *(process.pipe for process in self._living.values() if process.reporting)]

    @property
    def patience(self) -> float | None:
        """Seconds until processes that another's failure left are ended; None: there is no failure."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def over(self) -> bool:
        """Returns whether there is a result."""
        return not self._living or self.patience == 0.0

    @property
    def killed(self) -> bool:
        """Returns whether a process was killed from outside, as SIGKILL alone does for certain."""
        silent = [process.exit_code for process in self._failed if process.report.kind == "silent"]
        return -signal.SIGKILL in silent

    def advance(self, ready: Sequence[Any]) -> None:
        """Reads what is ready in `handles`; if a process fails, the others get a short time to report."""
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
        for process in self._mine:  # all before the first is waited for: each takes a moment to give its memory back
            process.signal(signal.SIGKILL)
        for process in self._mine:
            process.kill()
        self._signals.processes = [each for each in self._signals.processes if each not in self._mine]
        shutil.rmtree(self._folder, ignore_errors=True)


def advance(launches: Sequence[Launch], seconds: float) -> None:
    """Waits at most `seconds` until something happens in one of `launches`, and handles it."""
    patience = min((launch.patience for launch in launches if launch.patience is not None), default=seconds)
    ready = wait([handle for launch in launches for handle in launch.handles], min(patience, seconds))
    for launch in launches:
        launch.advance(ready)


def local(
    function: str,
    argument: Any,
    processes: int,
    *,
    saves: bool = False,
    from_training: bool = False,
    restarts: int = 0,
    meanwhile: Callable[[], None] | None = None,
) -> Any:
    """Runs `function` in new processes of this machine (see Launch), and waits for them.

    Args:
        saves: whether a signal makes the function save and return (see StopSignal); else the processes are ended.
        restarts: how often new processes run the function again after one was killed from outside.
        from_training: whether a process that was launched itself may start them.
        meanwhile: called when the processes have started, and then about once a second while they run.

    Returns:
        The result of process 0.

    Raises:
        GrappeError: a process raised it; ProcessDied if a process ended unexpectedly, with its name and last lines;
            PlanError if there are far more processes than cores.
        KeyboardInterrupt: after Ctrl-C; with `saves`, after the second one.
    """
    from grappe.launch.world import cores

    most = MOST_ON_A_CORE * cores()
    if processes > most:
        raise errors.PlanError(
            f"the plan has {processes} processes, and this machine {cores()} cores: start at most {most} here, or give "
            "the plan to more nodes (grappe submit)"
        )
    with SignalForwarding(saves=saves) as signals:
        while True:
            launch = Launch(function, argument, processes, signals, from_training=from_training)
            signals.over = False
            try:
                launch.start()
                while not launch.over and not (restarts and launch.killed):
                    if meanwhile is None:
                        launch.advance(wait(launch.handles, launch.patience))
                    else:
                        meanwhile()
                        advance([launch], 1.0)
                return launch.result()
            except errors.ProcessDied as error:
                if not (restarts and launch.killed) or signals.received:
                    raise
                restarts -= 1
                complain(
                    f"grappe: {first_line(error)}: starting again from the last checkpoint ({restarts} times left)"
                )
            finally:
                signals.over = True
                launch.close()


def _context(processes: int) -> BaseContext:
    """Chooses how to start processes: a single one is forked from this process, if nothing here can disturb a training.

    A server costs the start of another interpreter, which pays off for processes that share its imports, now or
    later in this command.
    """
    _warn_of_torch()
    try:
        threads = len(list(TASKS.iterdir()))
    except OSError:  # not on macOS, whose libraries do not bear a fork either
        threads = 0
    # A fork is safe with no other thread, whose locks would stay held, and no torch set up by a caller.
    if processes == 1 and threads == 1 and "torch" not in sys.modules and not forkserver_is_running():
        return multiprocessing.get_context("fork")
    start_server()
    return multiprocessing.get_context("forkserver")


class LocalProcess:
    """A process of one rank, and the pipe for its report."""

    def __init__(self, rank: ProcessRank, rendezvous_folder: Path) -> None:
        self._rank = rank
        self.log = child.early_log(rendezvous_folder, rank)
        self.report = child.Report(kind="none yet")
        self.process: Any = None
        self._ended = False
        self._killed_before = 0
        """Number of processes that the kernel had killed for want of memory when this one was started."""

    def start(self, payload: bytes, rendezvous_folder: Path, context: BaseContext) -> None:
        """Starts the process by `context`'s method."""
        self._killed_before = memory.killed()
        self.pipe, theirs = context.Pipe(duplex=False)
        terminal = _terminal() if self._rank.rank == 0 else None
        self.process = context.Process(  # type: ignore[attr-defined]
            target=child.run,
            args=(payload, self._rank, rendezvous_folder, theirs, terminal),
            name=f"{NAME}{self._rank.rank}",
        )
        try:
            with theirs, without_main():
                self.process.start()
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            raise errors.ProcessDied(f"{self.name} could not be started: {server_end() or error}") from error
        finally:
            if terminal is not None:
                terminal.close()

    @property
    def name(self) -> str:
        """Returns the process's name for messages."""
        return f"process {self._rank.rank} of {self._rank.size} on {host_name()}"

    @property
    def reporting(self) -> bool:
        """Returns whether the report is still to come."""
        return self.report.kind == "none yet"

    def read_report(self) -> None:
        """Reads the report, if it has arrived."""
        try:
            if self.reporting and self.pipe.poll():
                self.report = self.pipe.recv()
        except (EOFError, OSError):
            self.report = child.Report(kind="silent")

    def join(self) -> None:
        """Waits for the process's end, and reads its report, or the message of `child.end_now`."""
        self.process.join()
        self._ended = True
        self.read_report()
        if self.reporting:
            self.report = child.Report(kind="silent")
        if self.report.kind == "silent":
            self.report = child.last_words(self.log) or self.report

    @property
    def exit_code(self) -> int:
        """The process's exit code; negative: the signal that killed it."""
        return self.process.exitcode or 0

    @property
    def why(self) -> str:
        """The likely cause of the process's end, without a full stop; "" if there is none to name."""
        return hint(self.exit_code, self._killed_before)

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it is alive."""
        if self.process is not None and self.process.pid and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills the process, if it is alive, and waits for its end."""
        self.signal(signal.SIGKILL)
        if self.process is not None and self.process.pid:
            self.process.join()
            self.pipe.close()


def server_end(patience: float = PATIENCE_SECONDS) -> str:
    """Tells how the server that processes are forked from has ended; "" where it lives for `patience` seconds more."""
    code = forkserver_exit_code(patience)
    if code is None:
        return ""
    server = f"the server on {host_name()} that processes are started from"
    if code < 0:
        return _killed_by(server, -code, hint(code))
    return f"{server} ended by itself with exit code {code}; its output is above"


def _killed_by(who: str, number: int, why: str) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{who} was killed by {name} ({why})" if why else f"{who} was killed by {name}"


def hint(code: int, killed_before: int | None = None) -> str:
    """Returns the usual cause of an exit code, without a full stop.

    Args:
        killed_before: how many processes the system had killed for want of memory when this one was started; None: not
            known.
    """
    if code == -signal.SIGKILL:
        group = memory.control_group()
        if group and killed_before is not None and memory.killed() > killed_before:
            return (
                f"the system did, as the processes of this job or container may have {format_bytes(group.size)} of "
                "memory together, and needed more: grappe foresee shows plans that need less"
            )
        return "the system does that when memory runs out: see `dmesg`, or use a smaller batch_size"
    limited = limits_set() if code in REFUSED else []
    if not limited:
        return ""
    return f"libraries end like this when they get no more memory, and it is limited here: see {' and '.join(limited)}"


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hides `__main__` from multiprocessing, which would run the user's script again in each process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _terminal() -> child.Terminal | None:
    """Duplicates this process's standard output and error; None if the output is closed."""
    duplicates = []
    for usual, stream in enumerate((sys.stdout, sys.stderr), 1):
        # A notebook's or a test's stand-in names the descriptor that it hides; what reaches 1 or 2, it shows.
        descriptor = stream.fileno() if isinstance(stream, io.TextIOWrapper) else usual
        try:
            duplicates.append(os.dup(descriptor))
        except OSError:
            if not duplicates:
                return None
            duplicates.append(os.open(os.devnull, os.O_WRONLY))
        if stream is not None:
            stream.flush()
    return child.Terminal(*duplicates)


def explanation(failed: Sequence[LocalProcess]) -> errors.GrappeError:
    """Returns the error of the process that failed first, since the others' errors may follow from it."""

    def how_late(process: LocalProcess) -> tuple[bool, bool, float]:
        # A kill is noticed by its peers before it is noticed here; but NCCL aborts a process whose peer has failed.
        ended = process.exit_code >= 0 or process.exit_code == -signal.SIGABRT
        # A process that fails while it connects has cut its peers off before it can say why.
        return ended, lost_another(process.report.message), process.report.when

    first = min(failed, key=how_late)
    if first.report.kind == "error":
        error = getattr(errors, first.report.error, errors.GrappeError)(first.report.message)
        error.details = first.report.details
        return error
    who, number, why = first.name, first.exit_code, first.why
    if number < 0:
        end = _killed_by(who, -number, why)
    # The exit code that multiprocessing reports where the server cannot tell any more.
    elif number == UNKNOWN and (of_server := server_end()):
        end = f"{who} was ended together with the process that had started it: {of_server}"
    elif first.report.kind == "crashed":
        end = f"{who} failed with {first.report.error}"
    elif why:
        end = f"{who} ended by itself with exit code {number} ({why})"
    else:
        end = f"{who} ended by itself with exit code {number}"
    lines = last_lines(first.log)
    # gloo ends a process that gets another size than it waits for: no exception comes to a remedy.
    advice = f"\n{remedy(lines)}" if OTHER_SIZES.search(lines) else ""
    died = errors.ProcessDied(f"{end}{lines}{advice}")
    died.killed = number == -signal.SIGKILL
    return died


def lost_another(text: str) -> bool:
    """Returns whether an error with this text follows from another process's end."""
    return any(words in text for words in LOST)


def last_lines(log: Path) -> str:
    """Formats the end of a process's log, of this start only, to follow a message."""
    try:
        lines = files.read_text(log.resolve(), IN_PART).rstrip().splitlines()  # a link of this start's own
    except (OSError, errors.RunError):
        return ""
    begins = [index for index, line in enumerate(lines) if line.startswith(child.STARTED)]
    lines = lines[begins[-1] + 1 :] if begins else lines
    stack = list(itertools.dropwhile(lambda line: not line.startswith(child.FATAL), lines))
    lines = lines[: len(lines) - len(stack)]
    calls = [Line(match[1], int(match[2]), match[3]) for match in map(FRAME.match, stack) if match]
    own = next((call for call in calls if is_users_file(call.file)), None)
    advice = remedy("\n".join(lines)) if own else ""
    where = f" ({own})" + (f". {advice}" if advice else "") if own else ""
    if stack and own is None:
        current = itertools.dropwhile(lambda line: not line.startswith(child.CURRENT), stack)
        lines += [stack[0], *[line for line in current if FRAME.match(line)][:INNERMOST]]
    return where + "".join(f"\n  | {line}" for line in lines[-LAST_LINES:])


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Context in which classes of modules that were loaded by hand from a file go to other processes by value."""
    by_hand = [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and is_users_file(getattr(module, "__file__", None) or "<none>")
        and not any(finder.find_spec(name.partition(".")[0], None) for finder in sys.meta_path)
    ]
    for module in by_hand:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in by_hand:
            cloudpickle.unregister_pickle_by_value(module)
