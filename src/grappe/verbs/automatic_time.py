"""--time auto: the time limit of a job, from an earlier run or from what is foreseen, with a margin."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from typing import TYPE_CHECKING

from grappe.errors import GrappeError, TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.fields import split
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.sites import current
from grappe.sites.environment import MADE_ON_NODES
from grappe.sites.layout import Layout, ResourceRequest, layout, longest
from grappe.sites.schema import Site
from grappe.verbs.foresee.course import MARGIN, Costs, Course, limit
from grappe.verbs.foresee.limited import in_limited_process
from grappe.verbs.foresee.run_time import TimeSource, step_foreseen
from grappe.verbs.submission_memory import memory_judged, not_foreseen, room_for, sketch_of
from grappe.verbs.submit.resources import placed
from grappe.verbs.submit.submission import AUTO, Submission
from grappe.words import format_seconds

if TYPE_CHECKING:
    from grappe.task import Task

MADE_SECONDS, HERE_SECONDS = 600.0, 120.0
"""From the job's start to the command's: to make an environment on the nodes and examine them, or to examine them."""
START_SECONDS = 60.0  # of a process that was not measured: imports from a file system of a cluster
OF_A_STEP = 0.5  # of the time that training takes for as many samples: what an evaluation takes at most
WRITTEN = 2e8  # bytes/s of a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutomaticTime:
    """Time limit that was not given."""

    seconds: int
    sentence: str
    """The limit and its source."""
    memory: str | None
    """Warning about the memory, from the same trace, or ""; None: nothing was traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """A training's job whose time is not known yet."""

    submission: Submission
    task: Task
    site: Site
    plan: Plan
    layout: Layout

    @property
    def here(self) -> bool:
        """Returns whether the job's node is of this machine's kind, as far as is known: it is of the cluster here."""
        site, node = self.submission.job.site, self.site.node
        mine = site is None or site == current()
        return mine and self.layout.nodes == 1 and node is not None and node.cores == os.cpu_count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Known:
    """Costs that are known of a training."""

    costs: Costs
    steps_per_epoch: int
    origin: str
    """The source, for the user."""
    memory: str | None = None


def with_time(submission: Submission, wish: ResourceRequest) -> tuple[ResourceRequest, AutomaticTime | None]:
    """Adds the time limit where it is to be found; a limit that is given stays.

    Raises:
        UsageError: nothing is known of the training's time; the message says what to do.
        GrappeError: the submission is wrong, or the site forbids it.
    """
    if submission.job.time != AUTO:
        return wish, None
    from grappe.verbs.foresee.earlier import steps_done

    job = _job(submission, wish)
    known = _known(job)
    course = Course.of(
        submission.options,
        done=steps_done(submission.run) or submission.epochs_done * known.steps_per_epoch,
        epochs=job.task.epochs,
        steps_per_epoch=known.steps_per_epoch,
    )
    made = (submission.job.env or job.site.job.environment) in MADE_ON_NODES
    needed = known.costs.seconds(course) + (MADE_SECONDS if made else HERE_SECONDS)
    most = longest(job.layout, job.site, wish)
    found = limit(needed, 60 * (job.site.ask.min_minutes or 1), most)
    sentence = _limit_in_words(job, known, course, needed, found, capped=found < needed * (1 + MARGIN))
    return dataclasses.replace(wish, seconds=found), AutomaticTime(
        seconds=found, sentence=sentence, memory=known.memory
    )


def _job(submission: Submission, wish: ResourceRequest) -> _Job:
    from grappe.training.task_reference import TaskReference

    assert submission.task is not None
    site, plan = placed(submission, wish)
    least = 60 * (site.ask.min_minutes or 1)
    try:
        task = TaskReference.of(submission.task, split(submission.fields)).resolve()
    except (ImportError, TaskError) as error:
        raise UsageError(
            f"--time auto: the task cannot be loaded here ({error}): {_advice(submission)}"
        ) from error
    found = layout(plan, site, dataclasses.replace(wish, seconds=least))
    return _Job(submission=submission, task=task, site=site, plan=plan, layout=found)


def _known(job: _Job) -> _Known:
    """Finds what is known: measured by an earlier run, or else foreseen."""
    from grappe.verbs.foresee.earlier import Wanted, earlier

    submission = job.submission
    wanted = Wanted(task=job.task, plan=job.plan, site=job.site, layout=job.layout, here=job.here)
    found = earlier(wanted, submission.job.base, submission.run, submission.options)
    if found is not None:
        name = printable(found.folder.name, 100)
        return _Known(
            costs=found.costs, steps_per_epoch=found.steps_per_epoch, origin=f"as measured in the run {name}"
        )
    try:
        return _foreseen(job)
    except GrappeError as error:
        raise UsageError(
            f"--time auto: no run in {submission.job.base} has measured this task with this plan on such a device, and "
            f"its time cannot be foreseen: {error}. {_advice(submission)}"
        ) from error


def _advice(submission: Submission) -> str:
    words = shlex.join((submission.command, *submission.arguments))
    return (
        "Give a limit, as --time 3h; or try some steps first, after which --time auto knows them: "
        f"grappe submit --time 15m … -- {words} --steps 100"
    )


def _foreseen(job: _Job) -> _Known:
    """Foresees the training's time from one trace, from which the memory is memory_judged as well.

    Raises:
        GrappeError: it cannot be foreseen.
    """
    source = _source(job)
    if source.fabric is not None:
        origin = f"from the data sheet of {source.fabric.device.title}, not measured, at its slow end"
    else:
        origin = "from this machine's calibration, at its slow end, if the job's cores are as fast as these"
    progress("tracing the model, to foresee the time and the memory that the plan needs")
    try:
        found = json.loads(in_limited_process(lambda: _traced(job, source)))
    finally:
        progress("")
    return _Known(
        costs=Costs(**found["costs"]),
        steps_per_epoch=found["steps_per_epoch"],
        origin=origin,
        memory=found["memory"],
    )


def _source(job: _Job) -> TimeSource:
    """Returns what the steps of a job can be foreseen from.

    Raises:
        UsageError: there is nothing.
    """
    from grappe.foresight.devices import device_named
    from grappe.foresight.fabric import Fabric
    from grappe.verbs.foresee.times import calibrated_here

    if job.layout.gpus:
        assert job.site.node is not None
        device = device_named(job.site.node.gpu)
        if device is None:
            raise UsageError(f"no data sheet of {job.site.name}'s GPU ({job.site.node.gpu}) is known here")
        node = job.site.node
        return TimeSource(fabric=Fabric(device=device, node=node.gpus, network_gbit=node.network_gbit))
    if not job.here:
        raise UsageError(
            f"the nodes of {job.site.name} have other CPUs than this machine, as far as is known"
        )
    return TimeSource(calibration=calibrated_here())


def _traced(job: _Job, source: TimeSource) -> str:
    """Traces the model once; returns JSON: the costs, the steps of an epoch, and what is said of the memory."""
    sketch = sketch_of(job.task, job.submission, gpu=source.fabric is not None, records=True)
    plan = job.plan
    if source.fabric is None:
        plan = dataclasses.replace(plan, threads=plan.threads or job.layout.cores)
    step = step_foreseen(sketch, plan, source)
    batch = min(job.task.batch_size, sketch.samples)
    size = sum(one.size + sum((*one.states, *one.whole_states)) for one in sketch.parameters)
    costs = Costs(
        step=step.total,
        evaluation=OF_A_STEP * step.total * sketch.validation_samples / batch,
        save=size / WRITTEN,
        start=START_SECONDS,
        spread=step.spread,
    )
    room, memory = room_for(job.site, job.layout, job.plan), ""
    if room is not None:
        try:
            memory = memory_judged(sketch, job.plan, room)
        except GrappeError as error:
            memory = not_foreseen(error)
    return json.dumps(
        {
            "costs": dataclasses.asdict(costs),
            "steps_per_epoch": math.ceil(sketch.samples / job.task.batch_size),
            "memory": memory,
        }
    )


def _limit_in_words(
    job: _Job, known: _Known, course: Course, needed: float, found: int, *, capped: bool
) -> str:
    from grappe.sites.script import clock
    from grappe.training.watchers.expected_end import span

    evaluations = f"{course.evaluations:,} evaluation{'' if course.evaluations == 1 else 's'}"
    text = (
        f"time limit {clock(found)}: {course.steps:,} steps of {format_seconds(known.costs.slow_step)} and "
        f"{evaluations}, {known.origin}, with start-up"
    )
    if not capped:
        return f"{text} and a margin"
    text = f"{text}, take {span(needed)}, and {job.site.name} gives at most that limit"
    if job.submission.job.chain or not job.site.job.requeue:
        return (
            f"{text}: its jobs do not go back into the queue, so submit --chain {math.ceil(needed / found)}"
        )
    return f"{text}: the job saves before its end, goes back into the queue and resumes"
