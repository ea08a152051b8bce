"""Training: drives an engine from the first step to the last; evaluates, saves and calls watchers between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from grappe.data.batch import Batch
from grappe.data.loader import BatchLoader
from grappe.engines.base import Engine
from grappe.errors import DivergedError
from grappe.launch.signals import StopSignal
from grappe.launch.world import World
from grappe.profiling import memory, phases
from grappe.profiling.chronometer import Chronometer, StepTimes
from grappe.step.host_copy import HostCopy
from grappe.step.result import StepResult
from grappe.step.training_scores import Slice, TrainingScores
from grappe.training.average import WeightAverage
from grappe.training.evaluation import Evaluation
from grappe.training.headspace import Headspace
from grappe.training.sample_log import LoggedLoader
from grappe.training.saving import Saving
from grappe.training.watchdog import Watchdog
from grappe.training.watchers.base import Outcome, Record, RunInfo
from grappe.training.watchers.watcher_list import WatcherList

DELIVERY_SECONDS = 0.1  # quick steps are given to the watchers in groups: a step pays for none of them then


class Pending(NamedTuple):
    """A step whose numbers are still on the device."""

    result: StepResult
    seconds: float
    count: HostCopy | None
    """The loss's divisor, if it is on the device: the number of counted targets."""
    norm: HostCopy | None
    scores: Slice | None
    """Of training batches, if they are shown after this step."""


class Training:
    """Steps, evaluation, saving and stopping of a training, the same for every engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        loader: BatchLoader | LoggedLoader,
        info: RunInfo,
        world: World,
        evaluation: Evaluation,
        saving: Saving,
        watchers: WatcherList,
        chronometer: Chronometer,
        watchdog: Watchdog,
        stop_signal: StopSignal,
        average: WeightAverage,
        training_scores: TrainingScores,
        print_every: int | None,
        headspace: Callable[[StepTimes], Headspace],
        first_use: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.engine, self.chronometer, self.saving = engine, chronometer, saving
        self._loader, self._info, self._world, self._evaluation = loader, info, world, evaluation
        self._watchers, self._watchdog, self._stop_signal = watchers, watchdog, stop_signal
        self._average, self._headspace, self._first_use = average, headspace, first_use
        self._training_scores, self._print_every = training_scores, print_every or math.inf
        self._evaluate_every = evaluation.every or math.inf
        self._save_every = saving.every or math.inf
        self._pending: Pending | None = None
        self._settled: list[Record] = []  # not yet given to the watchers
        self._settled_seconds = 0.0
        self._delivery_seconds = 0.0 if watchers.prompt else DELIVERY_SECONDS
        self._stop: str | None = None
        self.step = info.start
        """Optimizer steps done, in earlier starts too."""

    def run(self) -> Outcome:
        """Trains until the last step, or until a signal, a limit or patience stops it. Collective.

        Raises:
            DivergedError: the loss is not a number any more.
        """
        start, last = self._info.start, self._info.last_step
        self._watchers.started(self._info)
        self.chronometer.begin()
        self._watchdog.start(start)
        outcome = None
        try:
            if self._evaluation.owed:
                self._evaluate(start)
            elif not start:
                with self._first_use():
                    self._evaluation.rehearse()
            self.engine.train(self._timed(self._loader.batches(start, last)), self.after)
            self.chronometer.finish()
            self._settle()
            self._deliver()
            self.saving.finish()
            outcome = self._outcome()
        finally:
            self._watchdog.stop()
            self.saving.close()
            try:
                self._deliver()
            finally:
                self._watchers.ended(outcome)
        return outcome

    def after(self, result: StepResult) -> bool:
        """Evaluates, saves and reports after a step; returns True when the training should stop."""
        seconds = self.chronometer.end_step()
        self._settle()
        if self._average.kept and not result.skipped:
            self._average.update()
        batch, norm = result.batch, result.norm
        count = None if batch.count.__class__ is float else HostCopy(batch.count)  # type: ignore[arg-type]
        self.step = self._watchdog.step = step = batch.step + 1
        scores = None if step % self._print_every else self._training_scores.copied()
        self._pending = Pending(result, seconds, count, None if norm is None else HostCopy(norm), scores)
        self._watchdog.marks += 1
        last = step == self._info.last_step
        evaluate = not step % self._evaluate_every or (last and self._evaluation.every is not None)
        save = not step % self._save_every or (last and self.saving.every is not None)
        if evaluate or save or self._stop is not None:
            self._between_steps(step, evaluate, save)
        return self._stop is not None

    def _between_steps(self, step: int, evaluate: bool, save: bool) -> None:
        """Evaluates and saves if due, when the numbers of `step` are known."""
        self._settle()
        self._deliver()
        # A signal does not wait for an evaluation: it is owed, and made when the training resumes.
        self._evaluation.owed = evaluate and self._stop is not None
        if evaluate and not self._evaluation.owed:
            self._evaluate(step)
        if save or self._stop is not None:
            self.saving.save(step, self._evaluation.state(step))

    def _evaluate(self, step: int) -> None:
        if self._evaluation.run(step):
            self._stop = "stopped"

    def _settle(self) -> None:
        """Reads the numbers of the step before: one step late, when the device has computed them."""
        if self._pending is None:
            return
        (result, seconds, count, norm, scores), self._pending = self._pending, None
        batch, info = result.batch, self._info
        self._watchdog.waiting = True
        total, flag = result.sums.read()
        metrics = {} if scores is None else self._training_scores.so_far(scores)
        self._watchdog.waiting = False
        step, epoch = batch.step, batch.epoch
        loss = total / float(batch.count if count is None else count.read())
        within = (step % info.steps_per_epoch + 1) * info.batch_size
        samples = epoch * info.samples + min(within, info.samples)
        size = None if norm is None else float(norm.read())
        # By position, as names take a microsecond.
        # A schedule of NumPy's numbers makes the rate one of them, which JSON does not know.
        rate = float(result.lr)
        record = Record(step + 1, epoch, samples, loss, rate, seconds, size, result.skipped, flag, metrics)
        if not (math.isfinite(loss) or record.skipped):
            self._diverged(record, batch)
        self._settled.append(record)
        self._settled_seconds += seconds
        if self._settled_seconds > self._delivery_seconds:
            self._deliver()
        if flag > 0 and self._stop is None:
            self._stop = "interrupted"

    def _deliver(self) -> None:
        """Passes to the watchers the steps that they have not seen."""
        if not self._settled:
            return
        records, self._settled, self._settled_seconds = self._settled, [], 0.0
        self._stop_signal.reserve(step=max(record.seconds for record in records))
        self._watchers.stepped(records)

    def _diverged(self, record: Record, batch: Batch) -> None:
        order = self._loader.order
        ids = order.samples(order.ids(batch.epoch, batch.step % self._info.steps_per_epoch))
        shown = ", ".join(str(index) for index in ids[:16]) + (", …" if len(ids) > 16 else "")
        raise DivergedError(
            f"the loss is {record.loss} in epoch {record.epoch + 1}, step {record.step} (sample ids {shown}). "
            "No checkpoint was overwritten: the last one is from an earlier step. "
            "Try a lower lr, clip=1, or look at those samples"
        )

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the same batches; the wait for each counts as data, the time after it as forward."""
        switch = self.chronometer.switch
        switch(phases.DATA)
        for batch in batches:
            switch(phases.FORWARD)
            yield batch
            switch(phases.DATA)
        switch(phases.WATCHING)

    def _outcome(self) -> Outcome:
        finished = "finished" if self.step >= self._info.total_steps else "paused"
        timing = self.chronometer.timing()
        return Outcome(
            status=self._stop or finished,
            step=self.step,
            scores=self._evaluation.scores,
            peaks=self._world.gather({**memory.peak(self._world.device), **self.chronometer.held}),
            timing=timing,
            headspace=self._headspace(timing),
            remarks=self.engine.remarks(),
        )
