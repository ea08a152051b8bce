"""Removes old checkpoints, but the newest few and the best, and finds what interrupted saves left; needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import secrets
import time
from pathlib import Path

from grappe.checkpoint.commit import strangers
from grappe.checkpoint.format import Checkpoint, list_checkpoints, validation_loss
from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.files import IN_PART


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Number of newest checkpoints to keep, besides the one with the lowest validation loss."""

    last: int = 3

    def clean(self, folder: Path, committed: int) -> list[Path]:
        """Removes old checkpoints, once the checkpoint of step `committed` is on disk; returns the removed folders.

        Checkpoints of later steps did not verify when the training resumed from an earlier step: they are not counted,
        so that they cannot displace intact ones.
        """
        removed = []
        candidates = [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step <= committed]
        for checkpoint in superfluous(candidates, self.last):
            with contextlib.suppress(OSError, RunError):  # tried again at the next commit
                if remove(checkpoint.folder):
                    removed.append(checkpoint.folder)
        return removed


def remove(checkpoint: Path) -> bool:
    """Removes a checkpoint's folder; returns False, and leaves it alone, where it holds what no save has put there."""
    if strangers(checkpoint):
        return False
    # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
    doomed = checkpoint.with_name(f".old-{checkpoint.name}.{secrets.token_hex(8)}")
    files.rename(checkpoint, doomed, IN_PART)
    files.remove_tree(doomed, IN_PART)
    return True


def superfluous(checkpoints: list[Checkpoint], last: int) -> list[Checkpoint]:
    """Returns those of `checkpoints`, newest first, that are neither among the `last` newest nor the best."""
    best = min(checkpoints, key=validation_loss, default=None)
    return [old for old in checkpoints[last:] if old is not best or validation_loss(old) == math.inf]


LEFT = re.compile(r"\.(step-\d{6,}|old-step-\d{6,})\.\w+", re.ASCII)


def leftovers(folder: Path, older_than_seconds: float = 0.0) -> list[Path]:
    """Lists the folders that interrupted saves left on disk: those that hold nothing but files of a save.

    Raises:
        RunError: `folder` is a link.
    """
    now = time.time()
    left = []
    with contextlib.suppress(OSError):  # no such folder, or somebody else removes them just now
        for name in files.names(folder):
            entry = folder / name
            ours = LEFT.fullmatch(name) and files.kind(entry) == "folder" and not strangers(entry)
            if ours and now - entry.lstat().st_mtime >= older_than_seconds:
                left.append(entry)
    return left
