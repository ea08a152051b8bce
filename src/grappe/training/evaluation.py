"""Evaluation: evaluates the model on the validation data during a training; decides on early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grappe.data.loader import BatchLoader
from grappe.engines.base import Engine
from grappe.errors import GrappeError, TaskError
from grappe.errors.user_code import is_users, sentence
from grappe.profiling import phases
from grappe.profiling.chronometer import Chronometer
from grappe.step.scores import Scores
from grappe.step.training_scores import TrainingScores
from grappe.training.average import WeightAverage
from grappe.training.first_step import refusing_late_parameters
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
        average: WeightAverage,
        training_scores: TrainingScores,
        task: object = None,
    ) -> None:
        self._task, self._training_scores = task, training_scores
        self._engine, self._loader, self._average = engine, loader, average
        self.every = options.evaluations_every(info.steps_per_epoch)
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
        weights = self._engine.evaluated_weights()
        with self._chronometer.during(phases.EVALUATION), weights, self._average.in_place():
            scores = self._engine.evaluate(batches, order.length)
            self.scores = self._training_scores.joined(scores)
        self._step = step
        self._watchers.evaluated(step, self.scores)
        return self._patience.exhausted(self.scores.loss)

    def rehearse(self) -> None:
        """Evaluates one batch and forgets it, so that what evaluation alone would raise is known now. Collective.

        Raises:
            TaskError: something in the task fails in evaluation.
        """
        if self.every is None:
            return
        order = self._loader.order
        batches = self._watchdog.counted(self._loader.rehearsed())
        try:
            with self._chronometer.during(phases.EVALUATION), refusing_late_parameters():
                self._engine.evaluate(batches, min(order.batch_size, order.length))
        except Exception as error:
            if isinstance(error, GrappeError) or not is_users(error):
                raise  # what a task's part must give is said without where it was seen first
            raise TaskError(
                f"evaluation fails (one batch of it is tried before the first step): {sentence(error, self._task)}"
            ) from error

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
