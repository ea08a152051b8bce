"""Folders that all processes of one start share: for the rendezvous, and for scratch files."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grappe.errors import UsageError
from grappe.launch.rank import ProcessRank, rank_from_environment

RUNS = Path("runs")
"""The folder of runs, of which all nodes of a job see the same."""


def rendezvous_folder_of(process: ProcessRank, run: Path | None) -> Path:
    """Returns the rendezvous folder: the run's folder for several nodes, else a private folder of this machine.

    Raises:
        UsageError: the private folder belongs to another user, or others may write there.
    """
    if process.size > process.local_size:
        return run or RUNS
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
    """Makes a folder that all processes of this start share; process 0 removes it in the end."""
    process = rank_from_environment()
    if process is None:
        with tempfile.TemporaryDirectory(prefix=f"grappe-{name}-") as folder:
            yield Path(folder)
        return
    shared = rendezvous_folder_of(process, None) / f"{name}-{process.job}"
    if process.rank == 0:
        shutil.rmtree(shared, ignore_errors=True)
    try:
        yield shared
    finally:
        if process.rank == 0:
            shutil.rmtree(shared, ignore_errors=True)
