"""Coordinator: has a study's trials trained, and writes down their results; may be killed anywhere."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.lease import Lease
from grappe.contrib.tune.journal import Journal
from grappe.contrib.tune.space import PLAN, Trial
from grappe.contrib.tune.study import Study
from grappe.contrib.tune.trainings import OF_THE_MACHINE, LocalTrainings, NotNow, SlurmTrainings, TrialEnd, failure
from grappe.errors import GrappeError, RunError, UsageError
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference, field_texts

POLL_SECONDS = 1.0
KILLS = 5
"""A trial that is killed so often, with no new checkpoint in between, has failed."""


class Coordinator:
    """Runs a study until `total` trials have ended; the one process that writes its journal.

    Args:
        request: of each trial's training, but for its fields and its folder.
        parallel: how many trials are trained at a time.
        watch: called about once a second.

    Attributes:
        study: the study.
        trainings: which has the numbers of the trials that are `running`.
        total: the number of trials.
        waiting: for the user: the reason why nothing can be started, or jobs that pend; "": nothing.
    """

    def __init__(
        self,
        study: Study,
        request: Request,
        trainings: LocalTrainings | SlurmTrainings,
        *,
        parallel: int,
        total: int,
        watch: Callable[[Coordinator], None],
    ) -> None:
        self.study, self.trainings, self.total, self.waiting = study, trainings, total, ""
        self._request, self._signals, self._parallel, self._watch = request, trainings.signals, parallel, watch
        self._lease = Lease(study.folder)
        self._journal: Journal
        self._parts = [float(part) for part in study.search.parts]
        self._kills: dict[int, tuple[int, int]] = {}
        self._error: GrappeError | None = None
        self._stop = False
        limit = request.options.time_limit
        self._deadline = math.inf if limit is None else time.monotonic() + limit

    def run(self) -> bool:
        """Returns whether all trials have ended; else a signal or the time limit has stopped them at a checkpoint.

        Raises:
            RunError: another coordinator runs this study, or its folder cannot be written, or is damaged.
            GrappeError: a trial cannot be trained here, whatever its fields.
        """
        self._lease.take()
        try:
            self._journal = Journal(self.study.folder, self.study.search)
            with self._signals:
                try:
                    self._advance([])
                    while self.trainings.running or (self._waits and not self._stopping):
                        self._advance(self.trainings.poll(POLL_SECONDS))
                finally:
                    self._signals.over = True
                    self.trainings.close()
        finally:
            self._lease.release()
        if self._error is not None:
            raise self._error
        return not self._journal.open and len(self.trials) >= self.total

    @property
    def trials(self) -> list[Trial]:
        """The study's trials, by number, as far as they have been drawn."""
        return self._journal.trials

    @property
    def _stopping(self) -> bool:
        over = time.monotonic() > self._deadline
        return self._stop or over or self._error is not None or self._signals.received

    @property
    def _has_room(self) -> bool:
        return not self._stopping and len(self.trainings.running) < self._parallel

    def _advance(self, ends: list[TrialEnd]) -> None:
        """Writes down what trials have come to; starts those that are open, and new ones, while there is room."""
        self._waits = ""
        try:
            for end in ends:
                self._take_in(end)
            for number in self._journal.open:
                if self._has_room and number not in self.trainings.running:
                    self._start(number)
            while self._has_room and len(self._journal.open) < self._parallel:
                if len(self.trials) >= self.total:
                    break
                self._lease.check()
                self._start(self._journal.ask())
        except OF_THE_MACHINE as error:
            self._end_by(error)
        self.waiting = self._waits or self.trainings.notes
        self._watch(self)

    def _end_by(self, error: GrappeError) -> None:
        """Stops the trainings at a checkpoint; `run` then raises the first such error."""
        self._error = self._error or error
        self.trainings.interrupt()

    def _start(self, number: int) -> None:
        """Trains an open trial up to its next rung, if that can be started now; its result may be there already."""
        trial = self._journal.trials[number]
        part, fields = self._parts[len(trial.rungs)], dict(trial.fields)
        plan, own = self._request.plan, fields.pop(PLAN, None)
        if own is not None:
            threads, plan = plan.threads, Plan.parse(own)
            plan = plan if plan.exact else dataclasses.replace(plan, threads=plan.threads or threads)
        try:
            task = with_fields(self._request.task, fields)
        except UsageError as error:  # the task itself refuses this combination
            self._note(number, failure(error))
            return
        folder, texts = self.study.run_folder(number), field_texts(task.resolve())
        trained = Run(folder).read_description().get("fields", {}) if Run.is_run(folder) else texts
        for name in trial.fields.keys() - {PLAN}:  # a run's plan may change
            if (value := trained.get(name)) != texts[name]:
                raise RunError(
                    f"{folder} was trained with {name}={value}, and the study draws {name}={trial.fields[name]} for "
                    "it: was it copied from another study? Remove that folder to train it again"
                )
        result = result_of(self.study, trial, part)
        if isinstance(result, tuple) or (result and Run(folder).is_finished()):
            self._note(number, result)
            if number in self._journal.open:
                self._start(number)
            return
        options = self._request.options
        if self._deadline < math.inf:
            options = dataclasses.replace(options, time_limit=max(1.0, self._deadline - time.monotonic()))
        if part < 1:
            options = dataclasses.replace(options, part=part)
        try:
            self.trainings.start(
                number, dataclasses.replace(self._request, task=task, plan=plan, options=options, run=folder)
            )
        except NotNow as reason:
            self._waits = str(reason)

    def _take_in(self, end: TrialEnd) -> None:
        """Writes down a trial's result, or leaves it open."""
        number, result = end.number, None
        if end.outcome == "trained":
            trial = self._journal.trials[number]
            result = result_of(self.study, trial, self._parts[len(trial.rungs)])
        if result is not None or end.outcome == "failed":
            self._note(number, result or end.reason)
        elif end.error is not None:
            self._end_by(end.error)
        elif end.outcome == "stopped":
            self._stop = True
        elif not self._stopping:  # killed: it stays open, to be resumed, unless it makes no progress
            checkpoints = list_checkpoints(self.study.run_folder(number) / "checkpoints")
            step = checkpoints[0].step if checkpoints else 0
            last_step, kills = self._kills.get(number, (step, 0))
            kills = kills + 1 if step <= last_step else 1
            self._kills[number] = (step, kills)
            if kills >= KILLS:
                reason = end.reason or "it was interrupted"
                self._note(number, f"{reason} {KILLS} times, with no new checkpoint in between")

    def _note(self, number: int, result: tuple[float, int] | str) -> None:
        """Writes down the metric of a trial's rung and its step, or the reason why it failed."""
        self._lease.check()
        if isinstance(result, str):
            self._journal.fail(number, reason=result)
        else:
            self._journal.report(number, *result)


def with_fields(task: TaskReference, texts: Mapping[str, str]) -> TaskReference:
    """The task with the fields in `texts`.

    Raises:
        UsageError: the task refuses them.
    """
    changed = task.with_values(**texts) if task.value is None else TaskReference.of(task.value, texts)
    changed.resolve()
    return changed


def result_of(study: Study, trial: Trial, part: float = 1.0) -> tuple[float, int] | str | None:
    """The metric at the end of `part` of a trial's training, and its step.

    Returns:
        The reason, if that is no number; None: the trial has not been trained so far.
    """
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return None
    run, name = Run(folder), study.search.metric
    description = run.read_description()
    step, total = description.get("step", 0), description.get("total_steps", 0)
    target = Options(part=part, steps=study.search.steps).last_step(total)
    if not step or not total or (step < target and not run.is_finished()):
        return None
    at = min(step, target)  # patience may have ended the training before
    evaluations = [record for record in run.records("evaluation") if isinstance(record.get("step"), int)]
    before = sorted((record for record in evaluations if record["step"] <= at), key=lambda record: record["step"])
    # Somebody may have taken the training further, who has evaluated it at other steps.
    if not before or (before[-1]["step"] < at and step == at):
        return f"metrics.jsonl has no readable evaluation of the last step, {at}"
    value, at = before[-1].get(name), before[-1]["step"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "not a finite number" if value is None else value
        return f"{name} is {shown} at step {at}"
    return float(value), at
