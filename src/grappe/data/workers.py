"""Data workers: how the processes that load samples begin, report errors and end."""

from __future__ import annotations

import atexit
import contextlib
import re
import signal
import weakref
from collections.abc import Iterator
from typing import Any

from grappe.data.shared_memory import explained
from grappe.errors import DataError, GrappeError
from grappe.launch.orphan import end_with_parent
from grappe.private_api.torch import end_data_workers

_KILLED = re.compile(r"DataLoader worker \(pid[^)]*\) is killed by signal: (?P<signal>[^.]*)")
_UNFINISHED: weakref.WeakSet[Iterator[Any]] = weakref.WeakSet()
"""Iterators of a DataLoader: an error of the user's may leave one to the end of the process."""


def begin_worker(_: int) -> None:
    """Prepares a new worker: it ends with its parent alone, not by a signal to all processes of a job."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def register(loaded: Iterator[Any]) -> None:
    """Has the workers of a DataLoader's iterator ended when this process ends, whoever still keeps the iterator."""
    _UNFINISHED.add(loaded)


@atexit.register  # before what multiprocessing has registered, which would wait for workers that ignore SIGTERM
def _end_unfinished() -> None:
    for loaded in list(_UNFINISHED):
        end_data_workers(loaded)


@contextlib.contextmanager
def explaining_ended_workers() -> Iterator[None]:
    """Context in which the end of a worker is one message, wherever torch's signal handler raises it."""
    try:
        yield
    except RuntimeError as error:
        explained_error = _explained(error)
        if explained_error is error:
            raise
        raise explained_error from error


def _explained(error: BaseException) -> BaseException:
    """Returns an error that says what to do, if `error` says that a worker has ended; else `error`."""
    cause = error.__cause__ or error  # torch's own says no more than that a worker has ended
    if (full := explained(cause)) is not cause:
        return full
    killed = _KILLED.search(str(cause)) or _KILLED.search(str(error))
    if killed is None and "exited unexpectedly" not in str(error):
        return explained(error)
    name = killed["signal"] if killed is not None else "no signal"
    number = next((number for number in signal.Signals if signal.strsignal(number) == name), None)
    why = " (mostly by the kernel, when memory is short)" if number == signal.SIGKILL else ""
    return DataError(
        f"a data worker was ended by {name if number is None else number.name}{why}. Nothing is lost that was saved: "
        "start the run again, with fewer of them (--plan workers=1, say) or loading=threads, or with more memory"
    )


def next_batch(loaded: Iterator[Any]) -> Any:
    """Returns the next batch of a DataLoader's iterator.

    Raises:
        GrappeError: the task's own message from a data worker, without the worker's traceback.
    """
    try:
        return next(loaded)
    except Exception as error:
        # Who keeps the error keeps its frames, and so the workers: a notebook would wait ten seconds for them later.
        end_data_workers(loaded)
        if not isinstance(error, GrappeError):
            raise _explained(error) from error.__cause__
        kind = type(error)
        raise kind(str(error).rstrip().rpartition(f"{kind.__name__}: ")[2]) from error
