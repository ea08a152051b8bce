"""Early stopping: counts evaluations without a lower loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Patience:
    """Counts evaluations since the best one; `patience` None never runs out."""

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._best = math.inf
        self._since = 0

    def exhausted(self, loss: float) -> bool:
        """Counts an evaluation; returns True when the training should stop, which is the same on every process."""
        if loss < self._best:
            self._best, self._since = loss, 0
        else:
            self._since += 1
        return self._patience is not None and self._since >= self._patience

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
        return {"best": self._best if math.isfinite(self._best) else None, "since": self._since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint's JSON."""
        best = state.get("best")
        self._best, self._since = (math.inf if best is None else float(best)), int(state.get("since", 0))
