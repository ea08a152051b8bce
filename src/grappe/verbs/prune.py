"""grappe prune: removes checkpoints that are not needed any more, and files of killed saves."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.table import Table

from grappe.checkpoint.commit import verify
from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.keep import superfluous
from grappe.checkpoint.lease import Lease
from grappe.checkpoint.saver import leftovers
from grappe.errors import RunError
from grappe.training.run import Run

Removed = tuple[Path, int]
"""A folder, and its bytes."""


def prune(runs: list[Run], keep: int, *, dry_run: bool = False) -> list[Removed]:
    """Removes from `runs` all but the `keep` newest checkpoints that verify and the best; returns what was removed.

    A run that is being written is skipped: its training removes its own checkpoints.
    """
    removed: list[Removed] = []
    for run in runs:
        lease = Lease(run.folder)
        try:
            lease.take()
        except RunError:
            continue
        try:
            for folder in _unneeded(run, keep):
                removed.append((folder, _bytes(folder)))
                if not dry_run:
                    _remove(folder)
        finally:
            lease.release()
    return removed


def _unneeded(run: Run, keep: int) -> list[Path]:
    # Those that do not verify are neither counted nor removed: they may be all that is left to look into.
    whole = [one for one in list_checkpoints(run.checkpoints) if verify(one.folder) is None]
    return [*leftovers(run.checkpoints), *(one.folder for one in superfluous(whole, keep))]


def _bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def _remove(folder: Path) -> None:
    if not folder.name.startswith("."):
        # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
        doomed = folder.with_name(f".old-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder = folder.rename(doomed)
    shutil.rmtree(folder)


def table(removed: list[Removed], *, dry_run: bool) -> Table | str:
    """Makes a table of removed folders and their bytes."""
    if not removed:
        return "nothing to remove"
    shown = Table("would remove" if dry_run else "removed", "bytes", box=None, padding=(0, 2, 0, 0))
    for folder, size in removed:
        shown.add_row(str(folder), f"{size:,}")
    shown.add_row("together", f"{sum(size for _, size in removed):,}")
    return shown
