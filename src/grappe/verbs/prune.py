"""grappe prune: removes checkpoints that are not needed any more, and files of killed saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grappe.checkpoint.commit import strangers, verify
from grappe.checkpoint.format import leftovers, list_checkpoints, remove, superfluous
from grappe.checkpoint.lease import Lease
from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.files import IN_PART
from grappe.training.run import Run
from grappe.words import plain_table

if TYPE_CHECKING:
    from rich.table import Table

Removed = tuple[Path, int]
"""A folder, and its bytes."""


def prune(runs: list[Run], keep: int, *, dry_run: bool = False) -> list[Removed]:
    """Removes from `runs` all but the `keep` newest checkpoints that verify and the best; returns what was removed.

    A run that is being written is skipped: its training removes its own checkpoints.
    """
    removed: list[Removed] = []
    for run in runs:
        if not files.kind(run.checkpoints):  # nothing to remove
            continue
        files.refuse_link(run.checkpoints)
        lease = Lease(run.folder)
        try:
            lease.take()
        except RunError:
            continue
        try:
            run_id = run.read_id()
            # Those that do not verify are neither counted nor removed: they may be all that is left to look into.
            saved = list_checkpoints(run.checkpoints)
            verified = [checkpoint for checkpoint in saved if verify(checkpoint.folder, run_id) is None]
            # A checkpoint in which a user keeps something is left alone.
            unneeded = [saved.folder for saved in superfluous(verified, keep) if not strangers(saved.folder)]
            for folder in [*leftovers(run.checkpoints), *unneeded]:
                size = sum((folder / name).lstat().st_size for name in files.names(folder, IN_PART))
                is_leftover = folder.name.startswith(".")
                if is_leftover and not dry_run:
                    files.remove_tree(folder, IN_PART)
                if dry_run or is_leftover or remove(folder):
                    removed.append((folder, size))
        finally:
            lease.release()
    return removed


def table(removed: list[Removed], *, dry_run: bool) -> Table | str:
    """Makes a table of removed folders and their bytes."""
    if not removed:
        return "nothing to remove"
    shown = plain_table("would remove" if dry_run else "removed", "bytes")
    for folder, size in removed:
        shown.add_row(str(folder), f"{size:,}")
    shown.add_row("together", f"{sum(size for _, size in removed):,}")
    return shown
