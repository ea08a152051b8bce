"""grappe evaluate: a run's scores on a split, every sample counted once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.errors import UsageError, nearest
from grappe.place import Place
from grappe.plan import Plan, as_plan
from grappe.run import Run
from grappe.scores import Scores
from grappe.task import SPLITS, Task
from grappe.verbs.load import newest, task_of
from grappe.verbs.session import TaskReference, blaming, start, user_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the processes of an evaluation are told."""

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
    """The scores of a run's newest checkpoint on `split`, under any plan.

    Raises:
        GrappeError: the run, its task or the split cannot be found.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in SPLITS:
        raise UsageError(f"split={split}: {nearest(split, SPLITS)}")
    if task is None and str(run.description.get("task")).startswith("__main__:"):
        task = task_of(run)  # of this script or notebook, which other processes cannot look into
    asked = Request(
        run=run.folder,
        task=TaskReference.of(task) if task is not None else None,
        plan=as_plan(plan),
        split=split,
        data=Path(data or run.description.get("data", "data")),
    )
    return start("grappe.verbs.evaluate:worker", asked, asked.plan)


def worker(asked: Request, place: Place, meet: Path) -> Scores:
    """One process of an evaluation. Collective."""
    from grappe import engines, world
    from grappe.data import feed
    from grappe.engines.base import Setting

    here = world.join(asked.plan, place, meet)
    engine = engines.check(asked.plan)
    run = Run(asked.run)
    task = asked.task.resolve() if asked.task is not None else task_of(run)
    dataset = user_call(task, "data", asked.split, asked.data)
    feed.check(dataset, asked.split, task)
    weights = newest(run).model
    batches = feed.evaluation_feed(task, dataset, asked.plan, here)
    with blaming(task):
        setting = Setting(
            task=task,
            plan=asked.plan,
            world=here,
            weights=weights,
            total_steps=1,
            flag=lambda: 0.0,
            example=batches.example(),
        )
        made = engine(setting)
        scores = made.evaluate(batches.batches(0, batches.ledger.steps_per_epoch), batches.ledger.length)
    made.close()
    here.barrier()
    here.leave()
    return scores
