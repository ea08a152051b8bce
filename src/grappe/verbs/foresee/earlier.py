"""Earlier runs: what a run of the same task and plan measured, from which a training's time is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.format import list_checkpoints
from grappe.errors import PlanError, RunError
from grappe.plan import Plan
from grappe.training.options import Options, occasions_left
from grappe.training.run import SAVED, Run, all_runs
from grappe.training.task_reference import field_texts, same_task, source_hash
from grappe.verbs.foresee.course import Costs
from grappe.verbs.foresee.run_time import costs_of, seconds, step_measured
from grappe.verbs.submit.jobs import submitted

if TYPE_CHECKING:
    from grappe.sites.layout import Layout
    from grappe.sites.schema import Site
    from grappe.task import Task

NOT_OF_A_STEP = ("epochs", "seed")
"""Fields of every task on which the time of a step does not depend."""
EVALUATED = 0.5  # of an epoch's steps: what an evaluation is taken to last where none was measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A training of which an earlier run is looked for."""

    task: Task
    plan: Plan
    site: Site
    layout: Layout
    here: bool
    """Whether the job's node is of this machine's kind, as far as is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Earlier:
    """An earlier run, with what it measured."""

    folder: Path
    costs: Costs
    steps_per_epoch: int


def earlier(wanted: Wanted, base: Path, run: Path | None, options: Options) -> Earlier | None:
    """Finds the run that is resumed, or else the newest in a folder, that measured this task, plan and device.

    Args:
        run: the run's folder that the user names, where there may be no run yet.
        options: of the training that is wanted; the run's saves are taken to be as far apart.
    """
    runs = [Run(run)] if run is not None and Run.is_run(run) else []
    for one in [*runs, *reversed(all_runs(base))]:
        try:
            known = one.read_description()
            if (step := step_measured(known)) is None or not _same(wanted, one, known):
                continue
            if (found := _measured(one, known, step, options)) is not None:
                return found
        except (RunError, PlanError):
            continue  # a damaged run, or one of another grappe
    return None


def steps_done(run: Path | None) -> int:
    """Returns the step of a run's newest checkpoint; 0 where there is none."""
    if run is None or not Run.is_run(run):
        return 0
    return max((one.step for one in list_checkpoints(Run(run).checkpoints)), default=0)


def _same(wanted: Wanted, run: Run, known: Mapping[str, Any]) -> bool:
    """Returns whether a run took the steps that are wanted, on such a device."""
    if not same_task(wanted.task, known) or known.get("source") != source_hash(wanted.task):
        return False
    mine, fields = field_texts(wanted.task), known.get("fields")
    if not isinstance(fields, dict) or {**fields, **{name: mine[name] for name in NOT_OF_A_STEP}} != mine:
        return False
    changes = known.get("changes")
    moved = isinstance(changes, list) and any("plan: " in str(one) for one in changes)
    if moved and known.get("status") not in SAVED:  # what it measured may be of the plan before
        return False
    plan = Plan.parse(str(known.get("plan") or ""))
    # Where "auto" became a CPU is known by the device.
    if dataclasses.replace(plan, device="auto") != dataclasses.replace(wanted.plan, device="auto"):
        return False
    if len(costs_of(known)) != plan.processes:
        return False
    return _on_gpus(wanted, run, known) if wanted.layout.gpus else _on_cpus(wanted, run, known)


def _on_gpus(wanted: Wanted, run: Run, known: Mapping[str, Any]) -> bool:
    """Returns whether a run was on GPUs of the site's kind: there, or on such a GPU elsewhere."""
    from grappe.foresight.devices import device_named, device_reported

    if known.get("device") != "cuda":
        return False
    if _was_on(run, wanted.site):
        return True
    device = device_reported(str(costs_of(known)[0].get("device")))
    return (
        device is not None and wanted.site.node is not None and device is device_named(wanted.site.node.gpu)
    )


def _on_cpus(wanted: Wanted, run: Run, known: Mapping[str, Any]) -> bool:
    """Returns whether a run was on CPUs of the site's kind, with the threads that the job's processes will have."""
    from grappe.foresight.calibration import Machine

    if known.get("device") != "cpu" or known.get("threads") != (wanted.plan.threads or wanted.layout.cores):
        return False
    mine = str(known.get("processor")).startswith(f"{Machine.here().processor}, ")
    return _was_on(run, wanted.site) or (wanted.here and mine)


def _was_on(run: Run, site: Site) -> bool:
    jobs = submitted(run.folder)
    return bool(jobs) and jobs[-1].get("site") == site.name


def _measured(run: Run, known: Mapping[str, Any], step: float, options: Options) -> Earlier | None:
    """Reads the costs of a run; None: its description lacks something."""
    start, fields = known.get("start"), known.get("fields")
    costs = costs_of(known)
    steps_per_epoch = start.get("steps_per_epoch") if isinstance(start, dict) else None
    batch = fields.get("batch_size") if isinstance(fields, dict) else None
    end, samples = costs[0].get("step"), costs[0].get("samples")
    if not all(isinstance(one, int) and one > 0 for one in (steps_per_epoch, batch, end, samples)):
        return None
    assert isinstance(steps_per_epoch, int) and isinstance(batch, int)
    assert isinstance(end, int) and isinstance(samples, int)
    first = max(0, end - -(-samples // batch))  # of the last start
    means = [sum(_seconds_of(one, "means").values()) for one in costs]
    each = max(step, *means)  # a mean has in it what comes seldom
    made = sum(
        isinstance(at := one.get("step"), int) and first < at <= end for one in run.records("evaluation")
    )
    evaluation = _total(costs, "evaluation") / made if made else EVALUATED * steps_per_epoch * each
    saved = occasions_left(first, end, options.saves_every(steps_per_epoch))
    return Earlier(
        folder=run.folder,
        costs=Costs(
            step=each,
            evaluation=evaluation,
            save=_total(costs, "checkpoint") / max(1, saved),
            start=_total(costs, "start"),
        ),
        steps_per_epoch=steps_per_epoch,
    )


def _total(costs: Sequence[dict[str, Any]], phase: str) -> float:
    """Returns the most seconds that a process of a start spent in a phase."""
    return max(_seconds_of(one, "totals").get(phase, 0.0) for one in costs)


def _seconds_of(cost: Mapping[str, Any], which: str) -> dict[str, float]:
    """Reads a process's seconds by phase."""
    found = cost["timing"].get(which)
    read = {name: seconds(value) for name, value in found.items()} if isinstance(found, dict) else {}
    return {name: value for name, value in read.items() if value is not None}
