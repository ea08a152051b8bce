"""TensorBoard: writes event files into the run's folder, one run over restarts: tensorboard --logdir runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grappe.training.watchers.logger import BINS, Logger


class TensorBoard(Logger):
    """Logger that writes to RUN/tensorboard; a restart voids entries of steps after its checkpoint."""

    name, voids = "tensorboard", True

    def open(self, folder: Path, start: int, description: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)
        if not start:
            run = {"task": description.get("task"), "plan": description.get("plan") or "one process"}
            fields = description.get("fields") or {}
            lines = [f"- {name}: {value}" for name, value in {**run, **fields}.items()]
            self._writer.add_text("description", "\n".join(lines))

    def scalars(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, values: Tensor) -> None:
        self._writer.add_histogram(name, values, step, bins=BINS)  # type: ignore[arg-type]

    def finish(self) -> None:
        self._writer.close()


LOGGER = TensorBoard
