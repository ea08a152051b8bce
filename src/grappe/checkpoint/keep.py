"""Which checkpoints are kept: the newest few, and the best."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from grappe.checkpoint.format import Checkpoint, found
from grappe.errors import RunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """How many of the newest checkpoints stay, beside the one with the lowest validation loss."""

    last: int = 3

    def clean(self, folder: Path) -> list[Path]:
        """Removes the others; only ever called when a newer one is committed. The folders removed."""
        removed = superfluous(found(folder), self.last)
        for checkpoint in removed:
            # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
            doomed = checkpoint.folder.with_name(f".old-{checkpoint.folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            checkpoint.folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return [checkpoint.folder for checkpoint in removed]


def superfluous(checkpoints: list[Checkpoint], last: int) -> list[Checkpoint]:
    """Those of `checkpoints`, newest first, that are neither among the `last` newest nor the best."""
    best = min(checkpoints, key=_loss, default=None)
    return [one for one in checkpoints[last:] if one is not best or _loss(one) == float("inf")]


def _loss(checkpoint: Checkpoint) -> float:
    try:
        loss = checkpoint.values.get("validation_loss")
    except RunError:
        return float("inf")
    return float(loss) if isinstance(loss, int | float) else float("inf")
