"""Removes old checkpoints; keeps the newest few and the best."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from pathlib import Path

from grappe.checkpoint.format import Checkpoint, list_checkpoints
from grappe.errors import RunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Number of newest checkpoints to keep, besides the one with the lowest validation loss."""

    last: int = 3

    def clean(self, folder: Path, committed: int) -> list[Path]:
        """Removes old checkpoints, once the checkpoint of step `committed` is on disk; returns the removed folders.

        Checkpoints of later steps did not verify when the training resumed from an earlier step: they are not counted,
        so that they cannot displace intact ones.
        """
        removed = []
        candidates = [one for one in list_checkpoints(folder) if one.step <= committed]
        for checkpoint in superfluous(candidates, self.last):
            # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
            doomed = checkpoint.folder.with_name(f".old-{checkpoint.folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            with contextlib.suppress(OSError):  # tried again at the next commit
                checkpoint.folder.rename(doomed)
                removed.append(checkpoint.folder)
            shutil.rmtree(doomed, ignore_errors=True)
        return removed


def superfluous(checkpoints: list[Checkpoint], last: int) -> list[Checkpoint]:
    """Returns those of `checkpoints`, newest first, that are neither among the `last` newest nor the best."""
    best = min(checkpoints, key=_loss, default=None)
    return [one for one in checkpoints[last:] if one is not best or _loss(one) == math.inf]


def _loss(checkpoint: Checkpoint) -> float:
    try:
        loss = checkpoint.read_values().get("validation_loss")
    except RunError:
        return math.inf
    return float(loss) if isinstance(loss, float) and math.isfinite(loss) else math.inf
