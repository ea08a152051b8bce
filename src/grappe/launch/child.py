"""Runs one process of a local launch: from its first instruction to its report to the command."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from grappe import errors
from grappe.errors.causes import broken_package, refused_process
from grappe.language import VARIABLE, chosen_language
from grappe.launch import files, imports
from grappe.launch.fork import end_with_parent
from grappe.launch.rank import ProcessRank
from grappe.launch.terminal import TERMINAL, complain
from grappe.private_api import torch_dynamo
from grappe.words import host_name

MOST_WORDS = 2000  # of an error's text: its first lines name the error
STARTED = "--- started "  # opens each start's part of a log
FATAL = "Fatal Python error: "  # opens the stacks of a process that a signal ended
FAILURE = "GRAPPE_FAILURE"  # the variable that names the file for a failure's exit code, in a job
WRONG, DOUBT = "wrong", "doubt"  # suffixes of the files next to it, with what speaks against nodes
CURRENT = "Current thread"  # opens the stack of the thread that the signal met


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a process at its end."""

    kind: str
    """"returned", "error" (a GrappeError, with a message for the user) or "crashed" (any other exception)."""
    when: float = dataclasses.field(default_factory=time.time)
    value: Any = None
    error: str = ""
    """The error's class."""
    message: str = ""
    details: str = ""


class Terminal:
    """Duplicates of the command's standard output and error, passed to a new process."""

    def __init__(self, *descriptors: int) -> None:
        self.descriptors = descriptors

    def close(self) -> None:
        """Closes the command's duplicates, once the process has started."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(map(reduction.DupFd, self.descriptors))


def _received(*duplicates: Any) -> Terminal:
    return Terminal(*(duplicate.detach() for duplicate in duplicates))


def run(
    payload: bytes, process: ProcessRank, rendezvous_folder: Path, pipe: Connection, terminal: Terminal | None
) -> None:
    """Runs the function that `payload` names, reports on `pipe`, and ends this process."""
    end_with_parent()
    code = errors.EXIT_FAILURE
    try:
        redirect(early_log(rendezvous_folder, process), process)
        faulthandler.enable(2)  # a library that aborts says nothing of the user's line
        name, argument, environment = cloudpickle.loads(payload)
        # A server that forked this process was started under an older environment.
        os.environ.clear()
        os.environ.update(environment)
        language = chosen_language()
        os.environ[VARIABLE] = "en"  # what this process writes goes to a log
        if terminal is not None:
            os.environ[TERMINAL] = f"{','.join(map(str, terminal.descriptors))} {language}"
        with imports.without_collection():
            torch_dynamo.leave_unloaded()
        value = imports.function(name)(argument, process, rendezvous_folder)
        report = Report(kind="returned", value=value if process.rank == 0 else None)
        # By value: pipe.send would leave tensors in this process's shared memory, to be fetched when it has ended.
        pipe.send_bytes(cloudpickle.dumps(report))
        code = errors.EXIT_OK
    except BaseException as error:
        mistake = error
        if isinstance(error, OSError) and errors.is_of_disk(error):
            mistake = errors.RunError(f"{error}: {errors.disk_advice(error)}")
        elif isinstance(error, OSError) and error.filename is not None:
            mistake = errors.of_file(error)
        if isinstance(mistake, errors.GrappeError):
            name, details = type(mistake).__name__, traceback.format_exc()
            pipe.send(Report(kind="error", error=name, message=str(mistake), details=details))
            code = mistake.exit_code
        else:
            traceback.print_exc()  # the last lines of the log tell the user
            plain = isinstance(error, Exception)
            if plain and (explanation := refused_process(error) or broken_package(error)) is not None:
                details = traceback.format_exc()
                pipe.send(Report(kind="error", error="UsageError", message=explanation, details=details))
                code = errors.EXIT_USAGE
            else:
                words = str(error)[:MOST_WORDS]
                pipe.send(Report(kind="crashed", error=type(error).__name__, message=words))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        pipe.close()
        os._exit(code)  # communication threads of a failed step may never join


def early_log(rendezvous_folder: Path, process: ProcessRank) -> Path:
    """Returns the file for a process's output before there is a run; afterwards a link to the run's log."""
    return rendezvous_folder / f"rank-{process.rank}.log"


def doubt(node: str, evidence: str, source: str) -> None:
    """Leaves what speaks against a node, on which a training may well finish, to the job's script."""
    accuse({node: f"{evidence} ({source})"}, DOUBT)


def accuse(nodes: Mapping[str, str], suffix: str = WRONG) -> None:
    """Leaves what speaks against nodes to the job's script, which notes it; does nothing outside of a job.

    What other processes have left stays. The file is this node's own: lines that two nodes append may be lost.
    """
    file = os.environ.get(FAILURE)
    if file and nodes:
        lines = [f"{int(time.time())} {node} {' '.join(evidence.split())}\n" for node, evidence in nodes.items()]
        file_of_node = Path(file).with_suffix(f".{suffix}-{host_name()}")
        with contextlib.suppress(OSError, errors.RunError), files.appender(file_of_node, files.IN_PART) as stream:
            stream.write("".join(lines).encode())


def fail(code: int) -> None:
    """Leaves the exit code to the job's script, which then ends the job for good; does nothing outside of a job."""
    if file := os.environ.get(FAILURE):  # srun reports only that the others were killed
        with contextlib.suppress(OSError, errors.RunError):
            files.replace(Path(file), str(code).encode(), files.IN_PART)


def end_now(rendezvous_folder: Path, process: ProcessRank, error: errors.GrappeError) -> None:
    """Ends this process from any thread, with an error for the user: the main thread may be blocked for ever."""
    accuse(error.nodes)
    if process.launcher == "grappe":
        text = f"{type(error).__name__}\n{error}"
        files.replace(_last_words(early_log(rendezvous_folder, process)), text.encode(errors="replace"))
    else:
        complain(f"grappe: {error}")
    # Of a job, whose script goes on after a kill: srun's own kill of the process that stands still may come later.
    os._exit(128 + signal.SIGKILL if error.nodes and FAILURE in os.environ else error.exit_code)


def last_words(log: Path) -> Report | None:
    """Makes the report of a process that `end_now` ended; `log` is its early log."""
    try:
        name, _, message = files.read_text(_last_words(log)).partition("\n")
    except OSError:
        return None
    return Report(kind="error", error=name, message=message)


def _last_words(log: Path) -> Path:
    return log.with_suffix(".last")


def redirect(log: Path, process: ProcessRank, early: Path | None = None) -> None:
    """Appends this process's standard output and error to `log`, after the content of `early`."""
    if early is not None:
        files.make_folder(log.parent)
    sys.stdout.flush()
    sys.stderr.flush()
    with files.appender(log, files.IN_PART) as stream:
        handle = os.dup(stream.fileno())
    if early is None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {process.rank} of {process.size} on {host_name()}"
        os.write(handle, f"{STARTED}{when}, {who}, pid {os.getpid()}\n".encode())
    else:
        os.write(handle, files.read_bytes(early))
        temporary = early.with_suffix(".link")
        temporary.symlink_to(log.absolute())
        temporary.replace(early)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
