"""grappe evaluate: a run's scores on a split, every sample counted once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.errors import UsageError, nearest
from grappe.errors.user_code import naming_user_line, user_call
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan, as_plan
from grappe.step.scores import Scores
from grappe.task import SPLITS, Task
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference
from grappe.verbs.load import data_of, newest, task_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """The input of an evaluation's processes."""

    run: Path
    task: TaskReference | None
    plan: Plan
    split: str
    data: Path


def evaluate(
    run: Run | Path | str,
    split: str = "validation",
    plan: Plan | str = "",
    *,
    task: Task | None = None,
    data: Path | str | None = None,
) -> Scores:
    """Evaluates a run's newest checkpoint on `split`, under any plan.

    Raises:
        GrappeError: the run, its task or the split cannot be found.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in SPLITS:
        raise UsageError(f"split={split}: {nearest(split, SPLITS)}")
    if task is None and str(run.read_description().get("task")).startswith("__main__:"):
        task = task_of(run)  # defined in this script or notebook, which other processes cannot import
    request = EvaluateRequest(
        run=run.folder,
        task=TaskReference.of(task) if task is not None else None,
        plan=as_plan(plan),
        split=split,
        data=data_of(run, data),
    )
    return start("grappe.verbs.evaluate:worker", request, request.plan)


def worker(request: EvaluateRequest, process: ProcessRank, rendezvous_folder: Path) -> Scores:
    """Runs one process of an evaluation. Collective."""
    from grappe import engines
    from grappe.data import loader
    from grappe.engines.base import EngineSetup
    from grappe.launch.world import join

    world = join(request.plan, process, rendezvous_folder)
    engine = engines.check(request.plan)
    run = Run(request.run)
    task = request.task.resolve() if request.task is not None else task_of(run)
    dataset = user_call(task, "data", request.split, request.data)
    loader.check(dataset, request.split, task)
    weights = newest(run).read_model()
    batches = loader.evaluation_loader(task, dataset, request.plan, world)
    with naming_user_line(task):
        setup = EngineSetup(
            task=task,
            plan=request.plan,
            world=world,
            weights=weights,
            total_steps=1,
            stop_requested=lambda: 0.0,
            sample_inputs=batches.example(),
        )
        running = engine(setup)
        scores = running.evaluate(batches.batches(0, batches.order.steps_per_epoch), batches.order.length)
    running.close()
    world.barrier()
    world.leave()
    return scores
