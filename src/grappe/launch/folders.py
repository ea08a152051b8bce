"""Folders that all processes of one start share: for the rendezvous, and for scratch files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grappe.launch import files
from grappe.launch.rank import ProcessRank, rank_from_environment

RUNS = Path("runs")
"""The folder of runs; all nodes of a job see the same folder."""


def rendezvous_folder_of(process: ProcessRank, run: Path | None) -> Path:
    """Returns the rendezvous folder: the run's folder for several nodes, else a private folder of the user's.

    Never in the machine's /tmp: names that all processes of a start know can be foreseen by others, too.
    """
    if process.size > process.local_size:
        return run or RUNS
    return private_folder() or run or RUNS


def private_folder() -> Path | None:
    """Makes or finds a folder in which nobody but the user can make anything; None where there is no room for one.

    It is in XDG_RUNTIME_DIR, which a login makes for its user, or in the user's state folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for base in (Path(runtime) if runtime.startswith("/") else None, state_base()):
        if base is not None and (folder := own_folder(base / "grappe")) is not None:
            return folder
    return None


def state_base() -> Path | None:
    """Returns XDG_STATE_HOME, ~/.local/state where it is not set, None where there is no home."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    if state_home.startswith("/"):  # the standard asks to ignore a relative path
        return Path(state_home)
    try:
        return Path.home() / ".local/state"
    except RuntimeError:
        return None


def own_folder(folder: Path) -> Path | None:
    """Makes `folder`, readable by the user alone; returns None if that fails, or others can write in it."""
    try:
        if not folder.parent.exists():  # with the same mode: mkdir leaves parents to the umask
            own_folder(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
        status = folder.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if ours and os.access(folder, os.W_OK | os.X_OK) else None


def state_folder(name: str, *, make: bool) -> Path | None:
    """Returns the user's own folder `name` of grappe's state; None: it cannot be, or is not there and not made."""
    base = state_base()
    if base is None:
        return None
    folder = base / "grappe"
    if not make and not (folder / name).is_dir():
        return None
    return own_folder(folder / name) if own_folder(folder) is not None else None


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Context that processes enter one after the other, where the file can be written and its disk has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Makes a folder that all processes of this start share; process 0 removes it in the end."""
    process = rank_from_environment()
    if process is None:
        with tempfile.TemporaryDirectory(prefix=f"grappe-{name}-") as folder:
            yield Path(folder)
        return
    shared = rendezvous_folder_of(process, None) / f"{name}-{process.job}"
    if process.rank == 0:
        files.remove_tree(shared)
    try:
        yield shared
    finally:
        if process.rank == 0:
            files.remove_tree(shared)
