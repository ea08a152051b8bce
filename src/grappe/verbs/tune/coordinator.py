"""Coordinator: starts a study's trials, a few at a time, and writes down what they come to; may be killed anywhere."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable

from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.lease import Lease
from grappe.errors import DataError, GrappeError, RunError, UsageError
from grappe.launch.local import Launch, advance
from grappe.launch.local_process import LocalProcess
from grappe.launch.signals import SignalForwarding
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.verbs.tune import gpus, objective, sampler
from grappe.verbs.tune.space import Space
from grappe.verbs.tune.study import Study, Trial
from grappe.verbs.tune.trial_task import with_fields

LOOK_SECONDS = 1.0
KILLS = 5
"""A trial that is killed so often, with no new checkpoint in between, has failed."""
STOPPING = (RunError, DataError)
"""Errors of the machine, not of a trial's fields: the study stops, and goes on from there when it is started again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """A study, as it is now."""

    study: Study
    trials: tuple[Trial, ...]
    """By number, as far as they have been drawn."""
    running: frozenset[int]
    total: int
    waiting: str = ""
    """Reason why nothing can be started; "": something can."""


class Coordinator:
    """Runs a study until `total` trials have ended; the one process that writes its records.

    Args:
        request: of each trial's training, but for its fields and its folder.
        watch: called with each change.
    """

    def __init__(
        self,
        study: Study,
        space: Space,
        request: Request,
        *,
        parallel: int,
        total: int,
        watch: Callable[[SearchProgress], None],
    ) -> None:
        self._study, self._space, self._request = study, space, request
        self._parallel, self._total, self._watch = parallel, total, watch
        self._lease = Lease(study.folder)
        self._trials: dict[int, Trial] = {}
        self._running: dict[int, tuple[int, Launch]] = {}
        self._processes: list[LocalProcess] = []
        self._signals = SignalForwarding(self._processes, saves=True)
        self._kills: dict[int, tuple[int, int]] = {}
        self._gpus = gpus.visible()
        self._waiting, self._first_open = "", 0
        self._error: GrappeError | None = None
        self._stop = False
        limit = request.options.time_limit
        self._deadline = None if limit is None else time.monotonic() + limit

    def run(self) -> bool:
        """Returns whether all trials have ended; else a signal or the time limit has stopped them at a checkpoint.

        Raises:
            RunError: another coordinator runs this study, or its folder cannot be written.
            GrappeError: a trial cannot be trained here, whatever its fields.
        """
        self._lease.take()
        try:
            self._trials = {one.number: one for one in self._study.trials}
            with self._signals:
                try:
                    self._loop()
                finally:
                    self._signals.over = True
                    for _, launch in self._running.values():
                        launch.close()
        finally:
            self._lease.release()
        if self._error is not None:
            raise self._error
        return all(self._ended(number) for number in range(self._total))

    def _loop(self) -> None:
        self._start_more()
        self._tell()
        while self._running or (self._waiting and not self._stopping):
            before = len(self._running)
            advance([launch for _, launch in self._running.values()], LOOK_SECONDS)
            for number, (_, launch) in list(self._running.items()):
                if launch.over:
                    self._settle(number, launch)
            if len(self._running) < before or self._waiting:
                self._start_more()
            self._tell()

    @property
    def _stopping(self) -> bool:
        over = self._deadline is not None and time.monotonic() > self._deadline
        return self._stop or over or self._error is not None or self._signals.received

    def _ended(self, number: int) -> bool:
        trial = self._trials.get(number)
        return trial is not None and trial.state != "open"

    def _start_more(self) -> None:
        """Starts what may be started, lowest number first: so the fields of all trials before are known."""
        self._waiting = ""
        for number in range(self._total):
            if self._stopping or len(self._running) >= self._parallel or not self._may_start(number):
                return
            if not self._ended(number) and number not in self._running:
                self._start(number)

    def _may_start(self, number: int) -> bool:
        if not sampler.learns(self._study.search.sampler):
            return True
        while self._ended(self._first_open):
            self._first_open += 1
        return number - self._study.search.lag < self._first_open

    def _start(self, number: int) -> None:
        folder = self._study.run_folder(number)
        if Run.is_run(folder) and (who := Lease(folder).held_by()):
            self._waiting = f"{folder.name} is being written by {who}"
            return
        try:
            trial = self._drawn(number)
            if Run.is_run(folder) and Run(folder).is_finished():
                self._write(objective.ended(self._study, trial))
                return
            self._launch(trial)
        except STOPPING as error:
            self._error = error

    def _drawn(self, number: int) -> Trial:
        """The trial with its fields, which are on disk before it starts."""
        trial = self._trials.get(number)
        if trial is None:
            known = number - self._study.search.lag + 1 if sampler.learns(self._study.search.sampler) else 0
            fields = sampler.draw(
                self._study.search.sampler,
                self._space,
                self._study.search.seed,
                number,
                [self._trials[one] for one in range(known)],
                [self._trials[one] for one in range(max(0, known), number)],
                maximize=self._study.search.maximize,
            )
            trial = Trial(number=number, fields=fields)
            self._write(trial)
        objective.refuse_another(self._study, trial)
        return trial

    def _launch(self, trial: Trial) -> None:
        plan, options = self._request.plan, self._request.options
        if self._deadline is not None:
            options = dataclasses.replace(options, time_limit=max(1.0, self._deadline - time.monotonic()))
        try:
            task = with_fields(self._request.task, trial.fields)
        except UsageError as error:  # the task itself refuses this combination
            self._write(objective.failed(trial, _line(error)))
            return
        request = dataclasses.replace(
            self._request, task=task, options=options, run=self._study.run_folder(trial.number)
        )
        place = min(set(range(self._parallel)) - {place for place, _ in self._running.values()})
        launch = Launch(
            "grappe.training.worker:worker",
            request,
            plan.processes,
            self._signals,
            self._processes,
            gpus.variables(plan, place, self._gpus),
        )
        self._running[trial.number] = (place, launch)
        launch.start()

    def _settle(self, number: int, launch: Launch) -> None:
        """Writes down what a trial has come to, or leaves it open."""
        trial = self._trials[number]
        try:
            status = launch.result().status
        except GrappeError as error:
            if launch.killed:
                self._again(trial, "it was killed (by SIGKILL, as the system does when memory runs out)")
            elif isinstance(error, STOPPING) or type(error) is UsageError:
                self._error = self._error or error
            else:
                self._write(objective.failed(trial, _line(error)))
        else:
            if status != "interrupted":
                self._write(objective.ended(self._study, trial))
            elif self._deadline is not None or "SLURM_JOB_END_TIME" in os.environ:
                self._stop = True
            elif not self._stopping:
                self._again(trial, "it was interrupted")
        finally:
            launch.close()
            del self._running[number]
        if self._error is not None:
            self._interrupt()

    def _again(self, trial: Trial, what: str) -> None:
        """Leaves a killed trial open, to be resumed, unless it gets nowhere."""
        checkpoints = list_checkpoints(self._study.run_folder(trial.number) / "checkpoints")
        step = checkpoints[0].step if checkpoints else 0
        reached, kills = self._kills.get(trial.number, (step, 0))
        kills = kills + 1 if step <= reached else 1
        self._kills[trial.number] = (step, kills)
        if kills >= KILLS:
            self._write(objective.failed(trial, f"{what} {KILLS} times, with no new checkpoint in between"))

    def _interrupt(self) -> None:
        """Stops the other trials at a checkpoint."""
        for process in self._processes:
            process.signal(signal.SIGTERM)

    def _write(self, trial: Trial) -> None:
        self._lease.check()
        self._study.write(trial)
        self._trials[trial.number] = trial

    def _tell(self) -> None:
        self._watch(
            SearchProgress(
                study=self._study,
                trials=tuple(self._trials[number] for number in sorted(self._trials)),
                running=frozenset(self._running),
                total=self._total,
                waiting=self._waiting,
            )
        )


def _line(error: GrappeError) -> str:
    """An error's first line."""
    name = type(error).__name__
    return f"{name}: {str(error).partition(chr(10))[0]}"
