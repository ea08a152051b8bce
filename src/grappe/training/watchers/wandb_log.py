"""Weights & Biases: logs offline unless WANDB_MODE says otherwise, one run over restarts: wandb sync RUN/wandb/*."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grappe.training.watchers.logger import BINS, Logger


class WandB(Logger):
    """Logger that writes to RUN/wandb. All starts of a run have one id, from its folder's name, and sync into one."""

    name = "wandb"

    def open(self, folder: Path, start: int, description: Mapping[str, Any]) -> None:
        import wandb

        name = folder.resolve().name
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grappe"),
            id=re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:128],
            name=name,
            dir=str(folder),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyrefly: ignore
            config={name: value for name, value in description.items() if name not in ("used", "costs")},
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def scalars(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            self._run.log({"step": step, **values})

    def histogram(self, step: int, name: str, values: Tensor) -> None:
        histogram = self._wandb.Histogram(values.numpy(), num_bins=BINS)  # pyrefly: ignore
        self._run.log({"step": step, name: histogram})

    def finish(self) -> None:
        self._run.finish()


LOGGER = WandB
