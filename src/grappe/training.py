"""Training: one training on this process, from its first step to its end; what happens behind each step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from grappe import memory, phases
from grappe.checkpoint import format as checkpoint_format
from grappe.checkpoint.saver import Saver
from grappe.chronometer import Chronometer
from grappe.data.batch import Batch
from grappe.data.feed import Feed
from grappe.engines.base import Engine, Saved
from grappe.errors import DivergedError, RunError
from grappe.interrupt import Interrupt
from grappe.loop import StepResult
from grappe.on_host import OnHost
from grappe.options import Options
from grappe.run import Run
from grappe.scores import Scores
from grappe.watchdog import Watchdog
from grappe.watchers.base import Outcome, Record, Watcher
from grappe.watchers.sample_ledger import SampleLedger
from grappe.watchers.stop import Patience
from grappe.world import World


class Training:
    """Drives an engine through its steps; its `after` bundles all watchers, so that every engine gets the same ones."""

    def __init__(
        self,
        *,
        engine: Engine,
        engine_name: str,
        world: World,
        run: Run,
        saver: Saver,
        options: Options,
        feed: Feed,
        validation: Feed,
        total_steps: int,
        watchers: Sequence[Watcher],
        interrupt: Interrupt,
        watchdog: Watchdog,
        chronometer: Chronometer,
    ) -> None:
        self.engine, self.world, self.run, self.options = engine, world, run, options
        self.feed, self.validation = feed, validation
        self._saver, self._engine_name = saver, engine_name
        self.per_epoch = feed.ledger.steps_per_epoch
        self.total_steps = min(total_steps, options.steps or total_steps)
        self._whole = total_steps
        self.start = 0
        self.batch_size = feed.ledger.batch_size
        self._length = feed.ledger.length
        self._evaluate_every = options.evaluate_every or self.per_epoch
        self._save_every = options.save_every or self.per_epoch
        self._watchers, self._interrupt, self._watchdog = watchers, interrupt, watchdog
        self._patience = Patience(options.patience)
        self._ledger = SampleLedger(run.folder / "ledger", world.rank) if options.ledger else None
        self._pending: tuple[StepResult, float, OnHost | None, OnHost | None] | None = None
        self._stop: str | None = None
        self._step = 0
        self._scores: Scores | None = None
        self._evaluated = self._saved = -1
        self._owed = False
        self.chronometer = chronometer

    def resume(self, found: checkpoint_format.Checkpoint) -> None:
        """Goes on from a checkpoint. Collective.

        Raises:
            RunError: it verifies, and yet holds what no training of grappe's wrote.
        """
        values = found.values
        try:
            saved = Saved(tensors=found.tensors, values=values.get("engine", {}))
            if values.get("engine_name") != self._engine_name:
                saved = saved.weights_only()
            self.engine.restore(saved)
            self._patience.restore(values.get("patience", {}))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RunError(
                f"{found.folder} verifies, but its state is not one that a training can go on from "
                f"({type(error).__name__}: {error}). Start a new run from its weights: --from {self.run.folder}"
            ) from error
        self.start = self._step = found.step
        self._owed = values.get("evaluation_owed") is True

    def run_to_end(self) -> Outcome:
        """Trains until the last step, or until something says stop. Collective.

        Raises:
            DivergedError: the loss is not a number any more.
        """
        for watcher in self._watchers:
            watcher.started(self)
        if self._ledger is not None:
            self._ledger.cut_back(self.start, self.world.size)
        self.chronometer.begin()
        outcome = None
        self._watchdog.start(self.start)
        try:
            if self._owed:
                with self._watchdog.doing("evaluation"):
                    self._evaluate(self.start)
            self.engine.train(self._timed(self.feed.batches(self.start, self.total_steps)), self.after)
            self.chronometer.finish()
            self._settle()
            self._finish_saving()
            outcome = self._outcome()
        finally:
            self._watchdog.stop()
            self._saver.close()
            if self._ledger is not None:
                self._ledger.flush()
            for watcher in self._watchers:
                watcher.ended(outcome)
        return outcome

    def after(self, result: StepResult) -> bool:
        """What happens behind a step; True when the training should stop."""
        seconds = self.chronometer.lap()
        self._settle()
        batch, norm = result.batch, result.norm
        # The count that the loss is divided by, where the device has it: of counted targets.
        count = None if batch.count.__class__ is float else OnHost(batch.count)  # type: ignore[arg-type]
        self._pending = (result, seconds, count, None if norm is None else OnHost(norm))
        self._step = self._watchdog.step = step = batch.step + 1
        self._watchdog.marks += 1
        last, bare = step == self.total_steps, self.options.bare
        evaluate = not bare and (last or not step % self._evaluate_every)
        save = not bare and (last or not step % self._save_every)
        if evaluate or save:
            self._settle()
        # A signal does not wait for an evaluation: it is owed, and made when the training goes on.
        self._owed = evaluate and self._stop is not None
        if evaluate and not self._owed:
            with self._watchdog.doing("evaluation"):
                self._evaluate(step)
        if save or self._stop is not None:
            self._settle()
            with self._watchdog.doing("save"):
                self._save(step)
        return self._stop is not None

    @property
    def steps_taken(self) -> int:
        """Since the training began, earlier starts too."""
        return self._step

    def _settle(self) -> None:
        """Reads the numbers of the step before; done one step late, when the device has them ready."""
        if self._pending is None:
            return
        (result, seconds, count, norm), self._pending = self._pending, None
        batch = result.batch
        total, flag = result.sums.read()
        step, epoch = batch.step, batch.epoch
        loss = total / float(batch.count if count is None else count.read())
        samples = epoch * self._length + min((step % self.per_epoch + 1) * self.batch_size, self._length)
        size = None if norm is None else float(norm.read())
        # By position, as names take a microsecond.
        record = Record(step + 1, epoch, samples, loss, result.lr, seconds, size, result.skipped, flag)
        if not (math.isfinite(loss) or record.skipped):
            self._diverged(record, batch)
        for watcher in self._watchers:
            watcher.stepped(record)
        self._interrupt.reserve(step=seconds)
        if flag > 0 and self._stop is None:
            self._stop = "interrupted"

    def _diverged(self, record: Record, batch: Batch) -> None:
        ids = self.feed.ledger.ids(batch.epoch, batch.step % self.per_epoch)
        shown = ", ".join(str(index) for index in ids[:16]) + (", …" if len(ids) > 16 else "")
        raise DivergedError(
            f"the loss is {record.loss} in epoch {record.epoch + 1}, step {record.step} (sample ids {shown}). "
            f"Nothing was saved over: the last checkpoint is from before. "
            "Try a lower lr, clip=1, or look at those samples"
        )

    def _evaluate(self, step: int) -> None:
        ledger = self.validation.ledger
        batches = self._watchdog.noted(self.validation.batches(0, ledger.steps_per_epoch))
        if self._ledger is not None:
            batches = self._ledger.noted(batches, "evaluation", step)
        with self.chronometer.during(phases.EVALUATION):
            self._scores = self.engine.evaluate(batches, ledger.length)
        self._evaluated = step
        for watcher in self._watchers:
            watcher.evaluated(step, self._scores)
        if self._patience.exhausted(self._scores.loss):
            self._stop = "stopped"

    def _save(self, step: int) -> None:
        if step == self._saved:
            return
        began = time.perf_counter()
        with self.chronometer.during(phases.CHECKPOINT):
            self._save_now(step)
        self._interrupt.reserve(saving=time.perf_counter() - began)

    def _save_now(self, step: int) -> None:
        for watcher in self._watchers:
            watcher.saved(step)
        if self._ledger is not None:
            self._ledger.flush()
        state = self.engine.state()
        values: dict[str, Any] = {
            "engine_name": self._engine_name,
            "engine": dict(state.values),
            "patience": self._patience.state(),
            "evaluation_owed": self._owed,
            "validation_loss": self._scores.loss if self._scores and self._evaluated == step else None,
        }
        problem = self._saver.save(step, state.tensors, state.own, values, state.stream)
        self._saved = step
        self._heed(problem)

    def _finish_saving(self) -> None:
        """Waits until the last save is committed: a training that ends has lost nothing."""
        with self._watchdog.doing("save"), self.chronometer.during(phases.CHECKPOINT):
            problem = self._saver.wait()
        if problem is not None:
            raise RunError(f"{problem}. The checkpoint before it is whole: free some space, and start again")

    def _heed(self, problem: str | None) -> None:
        """A save in the background failed: say so, and go on or stop as asked."""
        if problem is None:
            return
        if self.options.stop_on_failed_save:
            raise RunError(f"{problem}. The checkpoint before it is whole")
        for watcher in self._watchers:
            watcher.failed_to_save(problem)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the wait for each counts as data, what follows it as forward."""
        if self._ledger is not None:
            batches = self._ledger.noted(batches, "step")
        switch = self.chronometer.switch
        switch(phases.DATA)
        for batch in batches:
            switch(phases.FORWARD)
            yield batch
            switch(phases.DATA)
        switch(phases.WATCHING)

    def _outcome(self) -> Outcome:
        status = self._stop or ("finished" if self._step >= self._whole else "paused")
        peaks = self.world.gather({**memory.peak(self.world.device), **self.chronometer.held})
        timing = self.chronometer.timing()
        return Outcome(status=status, step=self._step, scores=self._scores, timing=timing, peaks=peaks)
