"""Coordinator: has a study's trials trained, and writes down their results; may be killed anywhere."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.lease import Lease
from grappe.errors import GrappeError, RunError, UsageError
from grappe.fields import parse
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference, field_texts
from grappe.verbs.tune.journal import Journal, rung_parts
from grappe.verbs.tune.space import PLAN, Trial
from grappe.verbs.tune.study import Study
from grappe.verbs.tune.trainings import OF_THE_MACHINE, NotNow, Trainings, TrialEnd, first_line

POLL_SECONDS = 1.0
KILLS = 5
"""A trial that is killed so often, with no new checkpoint in between, has failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """A study, as it is now."""

    study: Study
    trials: tuple[Trial, ...]
    """By number, as far as they have been drawn."""
    running: frozenset[int]
    total: int
    waiting: str = ""
    """Note for the user: the reason why nothing can be started, or jobs that pend; "": nothing."""


class Coordinator:
    """Runs a study until `total` trials have ended; the one process that writes its journal.

    Args:
        request: of each trial's training, but for its fields and its folder.
        parallel: how many trials are trained at a time.
        watch: called with each change.
    """

    def __init__(
        self,
        study: Study,
        request: Request,
        trainings: Trainings,
        *,
        parallel: int,
        total: int,
        watch: Callable[[SearchProgress], None],
    ) -> None:
        self._study, self._request = study, request
        self._trainings, self._parallel, self._total, self._watch = trainings, parallel, total, watch
        self._lease = Lease(study.folder)
        self._journal: Journal
        self._parts = [float(part) for part in rung_parts(study.search)]
        self._kills: dict[int, tuple[int, int]] = {}
        self._waiting = ""
        self._error: GrappeError | None = None
        self._stop = False
        limit = request.options.time_limit
        self._deadline = None if limit is None else time.monotonic() + limit

    def run(self) -> bool:
        """Returns whether all trials have ended; else a signal or the time limit has stopped them at a checkpoint.

        Raises:
            RunError: another coordinator runs this study, or its folder cannot be written, or is damaged.
            GrappeError: a trial cannot be trained here, whatever its fields.
        """
        self._lease.take()
        try:
            self._journal = Journal(self._study.folder, self._study.search, writes=True)
            with self._trainings:
                self._start_more()
                self._notify()
                while self._trainings.running or (self._waiting and not self._stopping):
                    ends = self._trainings.poll(POLL_SECONDS)
                    for end in ends:
                        try:
                            self._take_in(end)
                        except OF_THE_MACHINE as error:
                            self._end_by(error)
                    if self._error is None and (ends or self._waiting):
                        self._start_more()
                    self._notify()
        finally:
            self._lease.release()
        if self._error is not None:
            raise self._error
        return not self._journal.open and len(self._journal.trials) >= self._total

    @property
    def _stopping(self) -> bool:
        over = self._deadline is not None and time.monotonic() > self._deadline
        return self._stop or over or self._error is not None or self._trainings.stopping

    @property
    def _has_room(self) -> bool:
        return not self._stopping and len(self._trainings.running) < self._parallel

    def _start_more(self) -> None:
        """Starts the trials that are open, and new ones, while there is room."""
        self._waiting = ""
        try:
            for number in list(self._journal.open):
                if self._has_room and number not in self._trainings.running:
                    self._start(number)
            while self._has_room and len(self._journal.open) < self._parallel:
                if len(self._journal.trials) >= self._total:
                    return
                self._lease.check()
                self._start(self._journal.ask())
        except OF_THE_MACHINE as error:
            self._end_by(error)

    def _end_by(self, error: GrappeError) -> None:
        """Stops the trainings at a checkpoint; `run` then raises the first such error."""
        self._error = self._error or error
        self._trainings.interrupt()

    def _start(self, number: int) -> None:
        """Trains an open trial up to its next rung, if that can be started now; its result may be there already."""
        trial = self._journal.trial(number)
        part, fields = self._parts[len(trial.rungs)], dict(trial.fields)
        plan, text = self._request.plan, fields.pop(PLAN, None)
        if text is not None:
            own = Plan.parse(text)
            shares = own.threads is None and not own.exact
            plan = dataclasses.replace(own, threads=plan.threads) if shares else own
        try:
            task = with_fields(self._request.task, fields)
        except UsageError as error:  # the task itself refuses this combination
            self._fail(number, reason=first_line(error))
            return
        refuse_other_fields(self._study, trial, task)
        if has_trained_to(self._study, trial, part):
            self._report(number)
            if number in self._journal.open:
                self._start(number)
            return
        options = self._request.options
        if self._deadline is not None:
            options = dataclasses.replace(options, time_limit=max(1.0, self._deadline - time.monotonic()))
        if part < 1:
            options = dataclasses.replace(options, part=part)
        run = self._study.run_folder(number)
        request = dataclasses.replace(self._request, task=task, plan=plan, options=options, run=run)
        try:
            self._trainings.start(number, request)
        except NotNow as reason:
            self._waiting = str(reason)

    def _take_in(self, end: TrialEnd) -> None:
        """Writes down a trial's result, or leaves it open."""
        number = end.number
        trial = self._journal.trial(number)
        part = self._parts[len(trial.rungs)]
        missed = steps_missed(self._study, trial, part) if end.outcome == "trained" else ""
        if end.outcome == "trained" and not missed:
            self._report(number)
        elif end.outcome == "failed":
            self._fail(number, reason=end.reason)
        elif end.outcome == "stopped":
            self._stop = True
        elif end.outcome == "error":
            assert end.error is not None
            self._end_by(end.error)
        elif not self._stopping:  # killed: it stays open, to be resumed, unless it makes no progress
            checkpoints = list_checkpoints(self._study.run_folder(number) / "checkpoints")
            step = checkpoints[0].step if checkpoints else 0
            last_step, kills = self._kills.get(number, (step, 0))
            kills = kills + 1 if step <= last_step else 1
            self._kills[number] = (step, kills)
            if kills >= KILLS:
                reason = end.reason or missed
                self._fail(number, reason=f"{reason} {KILLS} times, with no new checkpoint in between")

    def _report(self, number: int) -> None:
        trial = self._journal.trial(number)
        result = result_of(self._study, trial, self._parts[len(trial.rungs)])
        if isinstance(result, str):
            self._fail(number, reason=result)
            return
        self._lease.check()
        self._journal.report(number, *result)

    def _fail(self, number: int, *, reason: str) -> None:
        self._lease.check()
        self._journal.fail(number, reason=reason)

    def _notify(self) -> None:
        trials, running = tuple(self._journal.trials), self._trainings.running
        waiting = self._waiting or self._trainings.notes
        self._watch(
            SearchProgress(study=self._study, trials=trials, running=running, total=self._total, waiting=waiting)
        )


def with_fields(task: TaskReference, texts: Mapping[str, str]) -> TaskReference:
    """The task with the fields in `texts`.

    Raises:
        UsageError: the task refuses them.
    """
    values: Mapping[str, Any] = texts
    if task.value is not None:
        kind = type(task.value)
        values = parse(kind, texts, f"task {kind.__name__}")
    changed = task.with_values(**values)
    changed.resolve()
    return changed


def has_trained_to(study: Study, trial: Trial, part: float) -> bool:
    """Returns whether the trial's training has come to `part` of its steps and was evaluated there; or has ended."""
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return False
    run = Run(folder)
    if run.is_finished():
        return True
    step, target, _ = _position(study, run, part)
    if not isinstance(step, int) or target is None or step < target:
        return False
    return bool(_evaluations(run, step, target))


def steps_missed(study: Study, trial: Trial, part: float) -> str:
    """Says where a training of an earlier rung ended, before `part` of the steps; "": the training went so far.

    A training that patience has stopped is complete.
    """
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return ""
    step, target, status = _position(study, Run(folder), part)
    short = isinstance(step, int) and target is not None and step < target
    return f"it ended at step {step} of {target}" if short and status != "stopped" else ""


def result_of(study: Study, trial: Trial, part: float = 1.0) -> tuple[float, int] | str:
    """The metric at the end of `part` of a trial's training, and its step; the reason, if that is no number."""
    run, name = Run(study.run_folder(trial.number)), study.search.metric
    step, target, _ = _position(study, run, part)
    # Patience may have ended the training before; an older run does not say how many steps there are.
    at = step if target is None or (isinstance(step, int) and step < target) else target
    evaluations = _evaluations(run, step, at)
    if not evaluations:
        return f"metrics.jsonl has no readable evaluation of the last step, {at}"
    value, at = evaluations[-1].get(name), evaluations[-1]["step"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "not a finite number" if value is None else value
        return f"{name} is {shown} at step {at}"
    return float(value), at


def _position(study: Study, run: Run, part: float) -> tuple[object, int | None, object]:
    """A run's last step, the step at which `part` of its training ends, and its status."""
    description = run.read_description()
    total = description.get("total_steps")
    options = Options(part=part, steps=study.search.steps)
    target = options.last_step(total) if isinstance(total, int) else None
    return description.get("step"), target, description.get("status")


def _evaluations(run: Run, step: object, at: object) -> list[dict[str, Any]]:
    """The evaluations at a step; of a training that somebody has taken further, those up to it, the last one last."""
    records = list(run.records("evaluation"))
    there = [record for record in records if record.get("step") == at]
    if there or not (isinstance(step, int) and isinstance(at, int) and step > at):
        return there
    before = [record for record in records if isinstance(record.get("step"), int) and record["step"] < at]
    return sorted(before, key=lambda record: record["step"])


def refuse_other_fields(study: Study, trial: Trial, task: TaskReference) -> None:
    """Raises RunError where the trial's run was made with other fields than `task` has, which is the trial's."""
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return
    fields, texts = Run(folder).read_description().get("fields", {}), field_texts(task.resolve())
    for name in trial.fields.keys() - {PLAN}:  # a run's plan may change
        value = fields.get(name)
        if value != texts[name]:
            raise RunError(
                f"{folder} was trained with {name}={value}, and the study draws {name}={trial.fields[name]} for it: "
                "was it copied from another study? Remove that folder to train it again"
            )
