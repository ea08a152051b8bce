"""Data workers: how the processes that load samples begin, report errors and end."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Iterator
from typing import Any

from grappe.data.shared_memory import explained
from grappe.errors import GrappeError
from grappe.launch.orphan import end_with_parent
from grappe.private_api.torch import end_data_workers

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
            raise explained(error) from error.__cause__
        kind = type(error)
        raise kind(str(error).rstrip().rpartition(f"{kind.__name__}: ")[2]) from error
