"""A training's time: its remaining steps, evaluations and saves, their cost in an earlier run, and a job's limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.checkpoint.format import list_checkpoints
from grappe.errors import PlanError, RunError
from grappe.errors.foreign_text import entries, printable
from grappe.foresight.devices import device_named, device_reported
from grappe.plan import Plan
from grappe.sites.layout import Layout
from grappe.sites.schema import Site
from grappe.task import Task
from grappe.training.job_records import submitted
from grappe.training.options import Options, occasions_left
from grappe.training.run import SAVED, Run, all_runs
from grappe.training.task_reference import field_texts, same_task, source_hash
from grappe.words import processor_name

MARGIN = 0.2  # for what varies: other users of a file system, of a network, of a node
MINUTE, HOUR = 60, 3600
LEAST_STEPS = 5  # in a median: fewer say little
NOT_OF_A_STEP = ("epochs", "seed")
"""Fields of every task on which the time of a step does not depend."""
EVALUATED = 0.5  # of an epoch's steps: what an evaluation is taken to last where none was measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemainingTraining:
    """Steps, evaluations and saves that are left of a training."""

    steps: int
    evaluations: int
    saves: int

    @classmethod
    def of(cls, options: Options, *, done: int, epochs: int, steps_per_epoch: int) -> RemainingTraining:
        """Counts what is left after `done` steps."""
        total = epochs * steps_per_epoch
        last = options.last_step(max(total, options.steps or 0) if options.steps_only else total)
        return cls(
            steps=max(0, last - done),
            evaluations=occasions_left(done, last, options.evaluations_every(steps_per_epoch)),
            saves=occasions_left(done, last, options.saves_every(steps_per_epoch)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Estimated seconds of each of a training's parts."""

    step: float
    evaluation: float
    save: float
    start: float
    """From the process's first instruction to the first step."""
    spread: float = 0.0
    """Relative uncertainty: at worst all takes 1 / (1 - spread) times as long."""
    steps_per_epoch: int
    origin: str
    """The source, for the user."""
    warnings: tuple[str, ...] | None = None
    """Warnings about the plan, if it was traced."""

    def seconds(self, remaining: RemainingTraining) -> float:
        """Computes the seconds of a training, at the pessimistic end."""
        repeated = remaining.evaluations * self.evaluation + remaining.saves * self.save
        return (self.start + remaining.steps * self.step + repeated) / (1 - self.spread)


def time_limit(seconds: float, least: int, most: int | None) -> int:
    """Computes a job's time limit in seconds: with the margin, rounded up to 5 minutes, 15 minutes or an hour.

    Args:
        most: the site's own limit; None: unknown.
    """
    padded = seconds * (1 + MARGIN)
    unit = 5 * MINUTE if padded <= 2 * HOUR else 15 * MINUTE if padded <= 12 * HOUR else HOUR
    rounded = max(least, unit, -int(-padded // unit) * unit)
    return rounded if most is None else min(rounded, most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunQuery:
    """A training for which an earlier run is searched."""

    task: Task
    plan: Plan
    site: Site
    layout: Layout
    here: bool
    """Whether the job's node is of this machine's kind, as far as is known."""


def earlier_run(query: RunQuery, base: Path, run: Path | None, options: Options) -> TimeEstimate | None:
    """Finds the run that is resumed, or else the newest in a folder, that measured this task, plan and device.

    Args:
        run: the run's folder that the user names, where there may be no run yet.
        options: of the training to come; the run's saves are taken to be as far apart.
    """
    resumed = [Run(run)] if run is not None and Run.is_run(run) else []
    for candidate in [*resumed, *reversed(all_runs(base))]:
        try:
            description = candidate.read_description()
            step = median_step(description)
            if step is None or not _took_such_steps(query, candidate, description):
                continue
            if (measured := _measured(candidate, description, step, options)) is not None:
                return measured
        except (RunError, PlanError):
            continue  # a damaged run, or one of another grappe
    return None


def steps_done(run: Path | None) -> int:
    """Returns the step of a run's newest checkpoint; 0 where there is none."""
    if run is None or not Run.is_run(run):
        return 0
    return max((checkpoint.step for checkpoint in list_checkpoints(Run(run).checkpoints)), default=0)


def _took_such_steps(query: RunQuery, run: Run, description: Mapping[str, Any]) -> bool:
    """Returns whether a run took the same steps as the query's, on such a device."""
    if not same_task(query.task, description) or description.get("source") != source_hash(query.task):
        return False
    requested = field_texts(query.task)
    if {**description.get("fields", {}), **{name: requested[name] for name in NOT_OF_A_STEP}} != requested:
        return False
    moved = any("plan: " in change for change in description.get("changes", ()))
    if moved and description.get("status") not in SAVED:  # what it measured may be of the plan before
        return False
    plan = Plan.parse(description.get("plan", ""))
    # Where "auto" became a CPU is known by the device.
    if dataclasses.replace(plan, device="auto") != dataclasses.replace(query.plan, device="auto"):
        return False
    if len(costs_of(description)) != plan.processes:
        return False
    jobs = submitted(run.folder)
    was_on_site = bool(jobs) and jobs[-1].get("site") == query.site.name
    if query.layout.gpus:  # of the site's kind: there, or such a GPU elsewhere
        device = device_reported(str(costs_of(description)[0].get("device")))
        node = query.site.node
        same = device is not None and node is not None and device is device_named(node.gpu)
        return description.get("device") == "cuda" and (was_on_site or same)
    # CPUs of the site's kind, with the threads that the job's processes will have.
    if description.get("device") != "cpu" or description.get("threads") != (query.plan.threads or query.layout.cores):
        return False
    same = str(description.get("processor")).startswith(f"{processor_name()}, ")  # with any instructions
    return was_on_site or (query.here and same)


def _measured(run: Run, description: Mapping[str, Any], step: float, options: Options) -> TimeEstimate | None:
    """Reads the costs of a run; None: its description lacks something."""
    costs = costs_of(description)
    steps_per_epoch = description.get("start", {}).get("steps_per_epoch")
    batch = description.get("fields", {}).get("batch_size")
    end, samples = costs[0].get("step"), costs[0].get("samples")
    if not all(isinstance(count, int) and count > 0 for count in (steps_per_epoch, batch, end, samples)):
        return None
    assert isinstance(steps_per_epoch, int) and isinstance(batch, int)
    assert isinstance(end, int) and isinstance(samples, int)
    first = max(0, end - -(-samples // batch))  # of the last start
    means = [sum(_seconds_of(cost, "means").values()) for cost in costs]
    each = max(step, *means)  # a mean includes rare events
    made = sum(isinstance(at := record.get("step"), int) and first < at <= end for record in run.records("evaluation"))
    evaluation = _total(costs, "evaluation") / made if made else EVALUATED * steps_per_epoch * each
    saved = occasions_left(first, end, options.saves_every(steps_per_epoch))
    name = printable(run.folder.name, 100)
    return TimeEstimate(
        step=each,
        evaluation=evaluation,
        save=_total(costs, "checkpoint") / max(1, saved),
        start=_total(costs, "start"),
        steps_per_epoch=steps_per_epoch,
        origin=f"as measured in the run {name}",
    )


def _total(costs: Sequence[dict[str, Any]], phase: str) -> float:
    """Returns the most seconds that a process of a start spent in a phase."""
    return max(_seconds_of(cost, "totals").get(phase, 0.0) for cost in costs)


def _seconds_of(cost: Mapping[str, Any], which: str) -> dict[str, float]:
    """Reads a process's seconds by phase."""
    read = {name: seconds_from(value) for name, value in entries(cost["timing"].get(which)).items()}
    return {name: value for name, value in read.items() if value is not None}


def median_step(description: Mapping[str, Any]) -> float | None:
    """Returns the median seconds of a step, of the slowest process; None: too few steps were measured."""
    medians = []
    for cost in costs_of(description):
        timing = entries(cost.get("timing"))
        steps, median = timing.get("steps"), seconds_from(entries(timing.get("step")).get("median"))
        if median is None or not isinstance(steps, int) or steps < LEAST_STEPS:
            return None
        medians.append(median)
    return max(medians, default=None)


def costs_of(description: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Returns the measurements of each process of a run; none of a run that has not ended."""
    return description.get("costs", ())


def seconds_from(value: object) -> float | None:
    """Reads a number of seconds above 0 from untrusted JSON; None: it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)
