"""Evaluation: evaluates the model on the validation data during a training; decides on early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grappe.data.loader import BatchLoader
from grappe.engines.base import Engine
from grappe.profiling import phases
from grappe.profiling.chronometer import Chronometer
from grappe.step.scores import Scores
from grappe.training.options import Options
from grappe.training.patience import Patience
from grappe.training.sample_log import LoggedLoader
from grappe.training.watchdog import Watchdog
from grappe.training.watchers.base import RunInfo
from grappe.training.watchers.watcher_list import WatcherList


class Evaluation:
    """Evaluations during a training; their state is part of each checkpoint."""

    def __init__(
        self,
        engine: Engine,
        loader: BatchLoader | LoggedLoader,
        info: RunInfo,
        options: Options,
        watchers: WatcherList,
        chronometer: Chronometer,
        watchdog: Watchdog,
    ) -> None:
        self._engine, self._loader = engine, loader
        self.every = None if options.bare else options.evaluate_every or info.steps_per_epoch
        """Steps between evaluations; None: there is none."""
        self._patience = Patience(options.patience)
        self._watchers, self._chronometer, self._watchdog = watchers, chronometer, watchdog
        self._step = -1
        self.scores: Scores | None = None
        """Of the last evaluation of this start."""
        self.owed = False
        """Whether a signal came before the evaluation that was due: it is made when the training resumes."""

    def run(self, step: int) -> bool:
        """Evaluates after `step`; returns True when patience is exhausted. Collective."""
        order = self._loader.order
        batches = self._watchdog.counted(self._loader.batches(0, order.steps_per_epoch))
        with self._chronometer.during(phases.EVALUATION):
            self.scores = self._engine.evaluate(batches, order.length)
        self._step = step
        self._watchers.evaluated(step, self.scores)
        return self._patience.exhausted(self.scores.loss)

    def state(self, step: int) -> dict[str, Any]:
        """Returns JSON for the checkpoint of `step`."""
        return {
            "patience": self._patience.state(),
            "evaluation_owed": self.owed,
            "validation_loss": self.scores.loss if self.scores and self._step == step else None,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restores a checkpoint's JSON."""
        self._patience.restore(values.get("patience", {}))
        self.owed = values.get("evaluation_owed") is True
