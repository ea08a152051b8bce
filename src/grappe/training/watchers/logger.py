"""Logger: the base of TensorBoard's and Weights & Biases' watchers, with scalars, and histograms at intervals."""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grappe.errors import UsageError
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from grappe.step.scores import Scores

EVERY = 100  # steps between histograms of parameters and gradients, as wandb.watch has it
BINS = 64
LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""The loggers: each is the file of its name next to this one, and needs the package of its name."""


class Logger(Watcher):
    """Watcher that logs a training to another program, from process 0; of a sharded model, that process's part."""

    @abstractmethod
    def open(self, folder: Path, start: int, description: Mapping[str, Any]) -> None:
        """Opens the log in `folder` for a run that continues from step `start`; later entries become void."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a step, by name."""

    @abstractmethod
    def histogram(self, step: int, name: str, values: Tensor) -> None:
        """Logs the distribution of finite `values` [N], float32 on the CPU."""

    @abstractmethod
    def finish(self) -> None:
        """Closes the log."""

    def started(self, info: RunInfo) -> None:
        self.open(info.folder, info.start, info.description)

    def stepped(self, record: Record) -> None:
        values = {"training/loss": record.loss, "training/lr": record.lr, "training/seconds": record.seconds}
        if record.norm is not None:
            values["training/norm"] = record.norm
        self.scalars(record.step, {name: value for name, value in values.items() if math.isfinite(value)})

    def evaluated(self, step: int, scores: Scores) -> None:
        scored = {"loss": scores.loss, **scores.metrics}
        values = {f"validation/{name}": value for name, value in scored.items() if isinstance(value, float)}
        self.scalars(step, {name: value for name, value in values.items() if math.isfinite(value)})

    def gradients_ready(self, step: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        if step % EVERY and step != 1:
            return
        for name, parameter in parameters:
            self._histogram(step, f"parameters/{name}", parameter.detach())
            if parameter.grad is not None:
                self._histogram(step, f"gradients/{name}", parameter.grad)

    def ended(self, outcome: Outcome | None) -> None:
        self.finish()

    def _histogram(self, step: int, name: str, values: Any) -> None:
        local = values.to_local() if hasattr(values, "to_local") else values
        flat = local.detach().float().flatten().cpu()
        finite = flat[flat.isfinite()]
        if len(finite):
            self.histogram(step, name, finite)


def distribution(values: Tensor) -> tuple[Any, Any]:
    """Computes a histogram of `values`: counts [BINS], and limits [BINS + 1] of the bins."""
    import numpy as np

    return np.histogram(values.numpy(), bins=BINS)


def check(name: str) -> None:
    """Checks that there is a logger called `name`.

    Raises:
        UsageError: there is no such logger, or its package is not installed.
    """
    if name not in LOGGERS:
        raise UsageError(f"--log={name}: there is {', '.join(sorted(LOGGERS))}")
    if importlib.util.find_spec(LOGGERS[name]) is None:
        raise UsageError(f"--log={name} needs a package that is not installed: pip install 'grappe[{name}]'")


def find(name: str) -> type[Logger]:
    """Makes the logger called `name`; raises like `check`."""
    check(name)
    return importlib.import_module(f"grappe.training.watchers.{name}_log").LOGGER
