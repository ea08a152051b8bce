"""Coordinator: has a study's trials trained, and writes down what they come to; may be killed anywhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.lease import Lease
from grappe.errors import GrappeError, UsageError
from grappe.training.request import Request
from grappe.verbs.tune import objective, sampler
from grappe.verbs.tune.local_trainings import OF_THE_MACHINE, line
from grappe.verbs.tune.schedule import Job, Schedule, parts, result_of
from grappe.verbs.tune.space import PLAN, Space
from grappe.verbs.tune.study import Study, Trial
from grappe.verbs.tune.trainings import Busy, Ended, Trainings
from grappe.verbs.tune.trial_task import with_fields, with_plan

LOOK_SECONDS = 1.0
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
    """Runs a study until `total` trials have ended; the one process that writes its records.

    Args:
        request: of each trial's training, but for its fields and its folder.
        parallel: how many trials are trained at a time.
        watch: called with each change.
    """

    def __init__(
        self,
        study: Study,
        space: Space,
        request: Request,
        trainings: Trainings,
        *,
        parallel: int,
        total: int,
        watch: Callable[[SearchProgress], None],
    ) -> None:
        self._study, self._space, self._request = study, space, request
        self._trainings, self._parallel, self._total, self._watch = trainings, parallel, total, watch
        self._lease = Lease(study.folder)
        self._trials: dict[int, Trial] = {}
        self._parts = [float(part) for part in parts(study.search)]
        self._waits = len(self._parts) > 1 or sampler.learns(study.search.sampler)
        self._schedule = Schedule(study.search, total=total, waits=self._waits)
        self._due: list[Job] = []
        self._jobs: dict[int, Job] = {}
        self._kills: dict[int, tuple[int, int]] = {}
        self._waiting = ""
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
            with self._trainings:
                self._loop()
        finally:
            self._lease.release()
        if self._error is not None:
            raise self._error
        return self._schedule.over and not self._due

    def _loop(self) -> None:
        self._start_more()
        self._tell()
        while self._jobs or (self._waiting and not self._stopping):
            ended = self._trainings.look(LOOK_SECONDS)
            for one in ended:
                try:
                    self._settle(one)
                except OF_THE_MACHINE as error:
                    self._end_by(error)
            if self._error is None and (ended or self._waiting):
                self._start_more()
            self._tell()

    @property
    def _stopping(self) -> bool:
        over = self._deadline is not None and time.monotonic() > self._deadline
        return self._stop or over or self._error is not None or self._trainings.stopping

    def _start_more(self) -> None:
        """Starts what may be started, in the order in which it was decided."""
        self._waiting = ""
        try:
            self._decide()
            while self._start_one():
                self._decide()
        except OF_THE_MACHINE as error:
            self._end_by(error)

    def _end_by(self, error: GrappeError) -> None:
        """Stops the trainings at a checkpoint; `run` then raises the first such error."""
        self._error = self._error or error
        self._trainings.interrupt()

    def _start_one(self) -> bool:
        """Starts the first of the due jobs that can be started; returns whether there was one."""
        for job in self._due:
            if self._stopping or len(self._jobs) >= self._parallel:
                return False
            if job.number not in self._jobs and self._start(job):
                self._due.remove(job)
                return True
        return False

    def _decide(self) -> None:
        """Takes in the jobs that are decided by what is known now, but for those that have their results."""
        for job in self._schedule.decided(self._trials.get):
            if self._waits:
                self._drawn(job)  # later ones are told of it
            trial = self._trials.get(job.number)
            if trial is None or result_of(trial, job.rung) is None:
                self._due.append(job)

    def _start(self, job: Job) -> bool:
        """Starts a job, unless its result is there; returns whether it is started or has its result."""
        trial, part = self._drawn(job), self._parts[job.rung]
        if result_of(trial, job.rung) is not None:
            return True
        objective.refuse_another(self._study, trial)
        if objective.reached(self._study, trial, part):
            self._write(objective.ended(self._study, trial, job.rung, part))
            return True
        options = self._request.options
        if self._deadline is not None:
            options = dataclasses.replace(options, time_limit=max(1.0, self._deadline - time.monotonic()))
        if part < 1:
            options = dataclasses.replace(options, part=part)
        try:
            fields = {name: text for name, text in trial.fields.items() if name != PLAN}
            task = with_fields(self._request.task, fields)
        except UsageError as error:  # the task itself refuses this combination
            self._write(objective.failed(trial, line(error)))
            return True
        run = self._study.run_folder(trial.number)
        plan = with_plan(self._request.plan, trial.fields)
        request = dataclasses.replace(self._request, task=task, plan=plan, options=options, run=run)
        try:
            self._trainings.start(trial.number, request)
        except Busy as busy:
            self._waiting = str(busy)
            return False
        self._jobs[trial.number] = job
        return True

    def _drawn(self, job: Job) -> Trial:
        """The trial with its fields, which are on disk before it starts."""
        trial = self._trials.get(job.number)
        if trial is None:
            told = [one for one in job.told if one.state != "open"]
            pending = [one for one in job.told if one.state == "open"]
            search = self._study.search
            fields = sampler.draw(
                search.sampler, self._space, search.seed, job.number, told, pending, maximize=search.maximize
            )
            trial = Trial(number=job.number, fields=fields)
            self._write(trial)
        return trial

    def _settle(self, ended: Ended) -> None:
        """Writes down what a trial has come to, or leaves it open."""
        job = self._jobs.pop(ended.number)
        trial = self._trials[ended.number]
        part = self._parts[job.rung]
        missed = objective.missed(self._study, trial, part) if ended.how == "trained" else ""
        if ended.how == "trained" and not missed:
            self._write(objective.ended(self._study, trial, job.rung, part))
            return
        if ended.how == "failed":
            self._write(objective.failed(trial, ended.reason))
            return
        self._due.insert(0, job)
        if ended.how == "stopped":
            self._stop = True
        elif ended.how == "error":
            assert ended.error is not None
            self._end_by(ended.error)
        elif not self._stopping:
            self._again(trial, ended.reason or missed)

    def _again(self, trial: Trial, what: str) -> None:
        """Leaves a killed trial open, to be resumed, unless it gets nowhere."""
        checkpoints = list_checkpoints(self._study.run_folder(trial.number) / "checkpoints")
        step = checkpoints[0].step if checkpoints else 0
        reached, kills = self._kills.get(trial.number, (step, 0))
        kills = kills + 1 if step <= reached else 1
        self._kills[trial.number] = (step, kills)
        if kills >= KILLS:
            self._write(objective.failed(trial, f"{what} {KILLS} times, with no new checkpoint in between"))

    def _write(self, trial: Trial) -> None:
        self._lease.check()
        self._study.write(trial)
        self._trials[trial.number] = trial

    def _tell(self) -> None:
        self._watch(
            SearchProgress(
                study=self._study,
                trials=tuple(self._trials[number] for number in sorted(self._trials)),
                running=self._trainings.running,
                total=self._total,
                waiting=self._waiting or self._trainings.notes,
            )
        )
