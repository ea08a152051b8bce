"""Logger: the base of watchers that log to other programs: scalars, each step once, and histograms at intervals."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import pkgutil
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from grappe.checkpoint.commit import read_json
from grappe.errors import UsageError
from grappe.errors.foreign_text import number
from grappe.launch import files
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from grappe.step.scores import Scores

EVERY = 100  # steps between histograms of parameters and gradients, as wandb.watch has it
BINS = 64
FLUSH_SECONDS = 1.0
MARK = "logged.json"
"""In the logger's folder: the last step and evaluation that were logged."""


class Logger(Watcher):
    """Watcher that logs a training to another program, from process 0; of a sharded model, that process's part.

    A start that was killed has logged steps that the next one takes again: they are logged once.
    """

    voids: ClassVar[bool] = False
    """Whether `open` voids entries of later steps: they are logged again then."""
    name: ClassVar[str]
    """The logger's name, which is also that of its folder in the run's."""

    @abstractmethod
    def open(self, folder: Path, start: int, description: Mapping[str, Any]) -> None:
        """Opens the log in `folder` for a run that continues from step `start`."""

    @abstractmethod
    def scalars(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Logs numbers by name, of steps in order."""

    def histogram(self, step: int, name: str, values: Tensor) -> None:
        """Logs the distribution of finite `values` [N], float32 on the CPU; nothing where there are no histograms."""

    @abstractmethod
    def finish(self) -> None:
        """Closes the log."""

    def started(self, info: RunInfo) -> None:
        files.make_folder(info.folder / self.name)
        self._mark = info.folder / self.name / MARK
        self._last = {"step": 0, "evaluation": 0}
        if not self.voids and files.kind(self._mark):
            written = read_json(self._mark)
            self._last = {kind: int(number(written.get(kind))) for kind in self._last}
        self._rows: list[tuple[int, Mapping[str, float]]] = []
        self._flushed = 0.0
        self.open(info.folder, info.start, info.description)

    def stepped(self, record: Record) -> None:
        values = {"training/loss": record.loss, "training/lr": record.lr, "training/seconds": record.seconds}
        if record.norm is not None:
            values["training/norm"] = record.norm
        self._log("step", record.step, values)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def evaluated(self, step: int, scores: Scores) -> None:
        scored = {"loss": scores.loss, **scores.metrics}
        values = {f"validation/{name}": value for name, value in scored.items() if isinstance(value, float)}
        self._log("evaluation", step, values)
        self._flush()

    def saving(self, step: int) -> None:
        self._flush()

    def _log(self, kind: Literal["step", "evaluation"], step: int, values: Mapping[str, float]) -> None:
        if step > self._last[kind]:
            self._last[kind] = step
            self._rows.append((step, {name: value for name, value in values.items() if math.isfinite(value)}))

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._rows:
            self.scalars(self._rows)
            self._rows = []
            with contextlib.suppress(OSError):  # a full disk is reported by the checkpoints
                files.replace(self._mark, json.dumps(self._last).encode(), files.IN_PART)

    def gradients_ready(self, step: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        if (step % EVERY and step != 1) or step <= self._last["step"]:
            return
        for name, parameter in parameters:
            self._histogram(step, f"parameters/{name}", parameter.detach())
            if parameter.grad is not None:
                self._histogram(step, f"gradients/{name}", parameter.grad)

    def ended(self, outcome: Outcome | None) -> None:
        self._flush()
        self.finish()

    def _histogram(self, step: int, name: str, values: Any) -> None:
        local = values.to_local() if hasattr(values, "to_local") else values
        flat = local.detach().float().flatten().cpu()
        finite = flat[flat.isfinite()]
        if len(finite):
            self.histogram(step, name, finite)


def names() -> list[str]:
    """Lists the loggers: each is the file NAME_log.py next to this one, and needs the package NAME."""
    modules = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name.removesuffix("_log") for name in modules if name.endswith("_log"))


def check(name: str) -> None:
    """Checks that there is a logger called `name`.

    Raises:
        UsageError: there is no such logger, or its package is not installed.
    """
    if name not in names():
        raise UsageError(f"--log={name}: there is {', '.join(names())}")
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"--log={name} needs a package that is not installed: pip install {name}")


def find(name: str) -> type[Logger]:
    """Makes the logger called `name`; raises like `check`."""
    check(name)
    return importlib.import_module(f"grappe.training.watchers.{name}_log").LOGGER
