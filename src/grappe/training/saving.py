"""Saving: writes a training's checkpoints, and resumes from one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from grappe.checkpoint.format import Checkpoint
from grappe.checkpoint.saver import SAMPLES, Saver
from grappe.checkpoint.weights import Weights
from grappe.engines.base import Engine, SavedState
from grappe.errors import RunError
from grappe.launch.signals import StopSignal
from grappe.profiling import phases
from grappe.profiling.chronometer import Chronometer
from grappe.training.average import WeightAverage
from grappe.training.evaluation import Evaluation
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.watchers.base import RunInfo
from grappe.training.watchers.watcher_list import WatcherList


class Saving:
    """Saves the engine's state and all else that a resumed training needs; the saver writes them in the background."""

    def __init__(
        self,
        engine: Engine,
        saver: Saver,
        info: RunInfo,
        options: Options,
        watchers: WatcherList,
        chronometer: Chronometer,
        stop_signal: StopSignal,
        average: WeightAverage,
    ) -> None:
        self._engine, self._saver, self._info, self._average = engine, saver, info, average
        self.every = options.saves_every(info.steps_per_epoch)
        """Steps between checkpoints; None: there is none but at a stop."""
        self._stop_on_failure = options.stop_on_failed_save
        self._watchers, self._chronometer, self._stop_signal = watchers, chronometer, stop_signal
        self._step = -1

    def save(self, step: int, evaluated: Mapping[str, Any]) -> None:
        """Saves the state after `step`, unless it is saved already; mostly in the background. Collective.

        Args:
            evaluated: the evaluation's state, JSON.

        Raises:
            RunError: the save before this one failed, with `stop_on_failed_save`.
        """
        if step == self._step:
            return
        began = time.perf_counter()
        with self._chronometer.during(phases.CHECKPOINT):
            self._watchers.saving(step)
            state = self._engine.state()
            values: dict[str, Any] = {
                "engine_name": self._info.engine,
                "engine": dict(state.values),
                **evaluated,
                SAMPLES: _samples(self._info, step),
            }
            averages, stream = self._average.tensors(), state.stream
            if stream is not None and averages:
                engines = stream
                stream = lambda: itertools.chain(engines(), averages.items())  # noqa: E731
            problem = self._saver.save(step, {**state.tensors, **averages}, state.local, values, stream)
            self._step = step
            self._report(problem)
        self._stop_signal.reserve(saving=time.perf_counter() - began)

    def wait(self) -> None:
        """Waits for the running save, if there is one. Collective; raises like `save`."""
        self._report(self._saver.wait())

    def finish(self) -> None:
        """Waits until the last save is committed, so that the end of a training loses nothing. Collective.

        Raises:
            RunError: the save failed.
        """
        with self._chronometer.during(phases.CHECKPOINT):
            problem = self._saver.wait()
        if problem is not None:
            raise RunError(f"{problem}. The checkpoint before it is whole: free some space, and start again")

    def close(self) -> None:
        """Ends the background thread, after an error too."""
        self._saver.close()

    def _report(self, problem: str | None) -> None:
        """Reports a failed save, and raises RunError with `stop_on_failed_save`."""
        if problem is None:
            return
        if not Run.is_run(self._info.folder):
            raise RunError(
                f"{problem}. The run's folder {self._info.folder} is gone or was moved, so nothing can be "
                "saved any more: if it was moved, move it back, and start again"
            )
        if self._stop_on_failure:
            raise RunError(f"{problem}. The checkpoint before it is whole")
        self._watchers.failed_to_save(problem)


def _samples(info: RunInfo, step: int) -> int:
    """Returns the position in the data behind `step`: training samples seen, over all epochs."""
    epoch, within = divmod(step, info.steps_per_epoch)
    return epoch * info.samples + within * info.batch_size


def resume(
    engine: Engine,
    evaluation: Evaluation,
    info: RunInfo,
    checkpoint: Checkpoint,
    tensors: Weights,
    average: WeightAverage,
) -> None:
    """Resumes from the checkpoint whose weights the engine was made with. Collective.

    Args:
        tensors: the checkpoint's tensors; the engine has the model's already, which are not read again.

    Raises:
        RunError: the checkpoint verifies, but has content that no training of grappe wrote.
    """
    values = checkpoint.read_values()
    here = _samples(info, checkpoint.step)
    if values.get(SAMPLES, here) != here:
        raise RunError(
            f"{checkpoint.folder} was saved behind {values[SAMPLES]} samples, and step {checkpoint.step} of this "
            f"training is behind {here}: it is not where it belongs. Start a new run from its weights: "
            f"--from {info.folder}"
        )
    try:
        saved = SavedState(tensors=tensors, values=values.get("engine", {}), model_loaded=True)
        # The optimizer's state means something to the engine that saved it only.
        engine.restore(saved if values.get("engine_name") == info.engine else saved.weights_only())
        evaluation.restore(values)
        average.restore(tensors)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RunError(
            f"{checkpoint.folder} verifies, but its state is not one that a training can go on from "
            f"({type(error).__name__}: {error}). Start a new run from its weights: --from {info.folder}"
        ) from error
