"""Loads a task's data: prepares it once a node, under a lock, and checks what is given."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.data.arrays import one_by_one
from grappe.data.kinds import check
from grappe.errors import DataError, GrappeError, TaskError
from grappe.errors.user_code import user_call
from grappe.task import Task, overrides
from grappe.words import host_name

if TYPE_CHECKING:
    from grappe.launch.world import World

LOCK = ".grappe-prepare.lock"


def dataset_of(task: Task, split: str, folder: Path) -> Any:
    """The samples of `split`.

    Raises:
        TaskError: the task's data() fails, or gives what is no map-style dataset.
    """
    dataset = user_call(task, "data", split, folder)
    check(dataset, split, task)
    return one_by_one(dataset) if overrides(task, "collate") else dataset


def refuse_differing_lengths(world: World, lengths: Mapping[str, int]) -> None:
    """Raises DataError on all processes where one has other numbers of samples, by split. Collective."""
    gathered = world.gather((host_name(), dict(lengths)))
    first_host, first = gathered[0]
    for rank, (host, theirs) in enumerate(gathered):
        for split, count in theirs.items():
            if count != first[split]:
                raise DataError(
                    f"process {rank} on {host} has {count:,} {split} samples, process 0 on {first_host} has "
                    f"{first[split]:,}: a file or shard is missing on one of them. Stage or copy the data anew"
                )


def prepare(task: Task, folder: Path, world: World | None = None) -> None:
    """Lets one process of each node prepare the data, one after the other where they share a disk. Collective.

    Raises:
        TaskError: the task's prepare() fails, on every process.
    """
    if not overrides(task, "prepare"):
        return
    problem: GrappeError | None = None
    if world is None or world.process.local_rank == 0:
        try:
            with _locked(folder):
                user_call(task, "prepare", folder)
        except GrappeError as error:
            problem = error
    problems = [problem] if world is None else world.gather(problem)
    if world is not None:
        problem = world.share(next((reported for reported in problems if reported is not None), None))
    if problem is not None:
        raise problem if world is None else TaskError(str(problem))


@contextlib.contextmanager
def once_at_a_time() -> Iterator[None]:
    """Context that this user's processes of this machine enter one after the other."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    with _locked(Path(state) / "grappe"):
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context that processes of all nodes enter one after the other, where their disk has locks and can be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that all read and none may write has its data
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
