"""Session: what the processes of a verb have in common. Which task, which plan, started here or by a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe import blame, engines, launch, mps, tasks
from grappe.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    GrappeError,
    ProcessDied,
    TaskError,
    UsageError,
)
from grappe.place import Place, place_from_environment
from grappe.plan import Plan
from grappe.task import Task, fields, overrides

BASE = Path("runs")
LEAVING_SECONDS = 2.0
FAILURE = "GRAPPE_FAILURE"  # the variable that names the file for a failure's exit code


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReference:
    """A task on its way to other processes: by name and field texts, or by value from a notebook or a script."""

    name: str
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    value: Task | None = None

    def resolve(self) -> Task:
        """The task itself.

        Raises:
            TaskError: it cannot be found or made, or lacks a part.
        """
        task = self.value if self.value is not None else tasks.make(tasks.find(self.name), self.texts)
        for part in ("model", "data", "loss", "optimizer"):
            if not overrides(task, part):
                raise TaskError(
                    f"the task {type(task).__name__} has no {part}(): write it, see grappe.Task.{part}"
                )
        return task

    @classmethod
    def of(cls, task: Task | type[Task] | str, texts: Mapping[str, str] | None = None) -> TaskReference:
        """A reference from a task, its class, or its name."""
        if isinstance(task, str):
            return cls(name=_absolute(task), texts=dict(texts or {}))
        value = task() if isinstance(task, type) else task
        if not isinstance(value, Task):
            raise TaskError(f"{value!r} is not a task: derive its class from grappe.Task")
        kind = type(value)
        return cls(name=f"{kind.__module__}:{kind.__qualname__}", value=value)


def prepare(plans: Sequence[str], task: str | None = None, run: Path | None = None) -> None:
    """Refuses what can be refused before torch is loaded; then has it loaded where processes will start from.

    Raises:
        UsageError: a plan's text or the task's name is wrong.
    """
    for plan in plans:
        engines.check_name(Plan.parse(plan).engine)
    if task is not None:
        tasks.check_name(task)
    done = run is not None and (run / "done").exists()
    if not done and place_from_environment() is None:
        launch.warm(metrics=task is None or tasks.mentions(task, launch.METRICS))


def same_task(task: Task, description: Mapping[str, Any]) -> bool:
    """Whether a run's description is of this task: the same class, wherever its file lies now."""
    return description.get("class") == type(task).__qualname__


def field_texts(task: Task) -> dict[str, Any]:
    """The task's fields as JSON has them."""
    return {name: value if _is_plain(value) else repr(value) for name, value in fields(task).items()}


def start(function: str, request: Any, plan: Plan, *, saves: bool = False) -> Any:
    """Runs function(request, place, meet) on the plan's processes: those of torchrun or srun, or our own.

    Args:
        request: its `run`, a path or None, is where processes of several nodes meet.
        saves: whether a signal makes the function save and return.

    Returns:
        What process 0 returned; under a launcher, what this process did.

    Raises:
        GrappeError: what went wrong. Under a launcher one process raises it, and the others SystemExit.
    """
    place = place_from_environment()
    if place is None:
        with mps.shared_gpus(plan, None):
            return launch.local(function, request, plan.processes, saves=saves)
    plan.check_fits(place.size)
    module, _, name = function.partition(":")
    try:
        with mps.shared_gpus(plan, place):
            return getattr(importlib.import_module(module), name)(
                request, place, meeting_place(place, request.run)
            )
    except Exception as error:
        raise _said_once(error, place) from error


def _said_once(error: Exception, place: Place) -> BaseException:
    """`error` for the user, from one process; the others leave without a word."""
    from grappe.rendezvous import may_speak

    ours = isinstance(error, GrappeError)
    code = error.exit_code if ours else EXIT_FAILURE
    if ours or not _lost_another(error):
        _leave_code(code)
    if not may_speak(place):
        return SystemExit(code)
    who = f"process {place.rank} of {place.size} on {os.uname().nodename}"
    if not ours:
        told: GrappeError = ProcessDied(f"{who} {_words(error)}")
    else:
        told = type(error)(f"{who}: {error}" if place.rank else str(error))
    told.by = who
    told.details = "".join(traceback.format_exception(error))
    return told


def _leave_code(code: int) -> None:
    """For the batch script: srun tells it only that the others were killed when one fails."""
    if file := os.environ.get(FAILURE):
        with contextlib.suppress(OSError):
            Path(file).write_text(str(code))


def _lost_another(error: Exception) -> bool:
    """Whether an error follows from another process's end."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe"))


def _words(error: Exception) -> str:
    if _lost_another(error):
        return "lost another process, which has ended: the launcher says which, and how"
    return f"failed with {type(error).__name__}: {error}"


def speaks() -> bool:
    """Whether this process is process 0, or the only one: the one that prints results."""
    try:
        place = place_from_environment()
    except UsageError:  # it is being told just now
        return True
    return place is None or place.rank == 0


def interrupted() -> int:
    """The exit code of an interrupted training: 75 from process 0, once the others have left with 0.

    `srun --kill-on-bad-exit` would end them at the first 75, and torchrun turns any failure into 1.
    """
    place = place_from_environment()
    if place is None or place.size == 1:
        return EXIT_INTERRUPTED
    if place.rank:
        sys.stdout.flush()
        os._exit(EXIT_OK)  # at once, and not after the seconds that Python takes to tidy up
    time.sleep(LEAVING_SECONDS)
    return EXIT_INTERRUPTED


def meeting_place(place: Place, run: Path | None) -> Path:
    """A folder that all processes of this start see: the run's between nodes, private to this machine else.

    Raises:
        UsageError: it is not ours.
    """
    if place.size > place.local_size:
        return run or BASE
    folder = Path(tempfile.gettempdir()) / f"grappe-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        # Whoever can write there can make our processes talk to theirs.
        raise UsageError(
            f"{folder} can be written by others: remove it, or set TMPDIR to a folder of your own"
        )
    return folder


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A new folder that all processes of this start see; process 0 throws it away in the end."""
    place = place_from_environment()
    if place is None:
        with tempfile.TemporaryDirectory(prefix=f"grappe-{name}-") as folder:
            yield Path(folder)
        return
    shared = meeting_place(place, None) / f"{name}-{place.job}"
    if place.rank == 0:
        shutil.rmtree(shared, ignore_errors=True)
    try:
        yield shared
    finally:
        if place.rank == 0:
            shutil.rmtree(shared, ignore_errors=True)


@contextlib.contextmanager
def blaming(task: Task) -> Iterator[None]:
    """An exception that came through the task's own code becomes one message that names its line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GrappeError) or not blame.is_users(error):
            raise
        raise TaskError(f"{type(task).__name__} failed: {blame.sentence(error)}") from error


def user_call(task: Task, method: str, *arguments: Any) -> Any:
    """Calls a part of the task; an exception in it becomes one message that names its line."""
    try:
        return getattr(task, method)(*arguments)
    except GrappeError:
        raise
    except Exception as error:
        raise TaskError(f"{type(task).__name__}.{method}() failed: {blame.sentence(error)}") from error


def _absolute(name: str) -> str:
    place, colon, rest = name.partition(":")
    if place.endswith(".py"):
        return f"{Path(place).resolve()}{colon}{rest}"
    return name


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
