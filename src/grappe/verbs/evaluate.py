"""grappe evaluate: a run's scores on a split, every sample counted once."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.checkpoint.commit import read_json, write_json
from grappe.checkpoint.format import Checkpoint, step_folder
from grappe.errors import RunError, UsageError, nearest
from grappe.errors.user_code import naming_user_line
from grappe.launch import files
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.launch.world import joined
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.step.scores import Scores
from grappe.task import SPLITS, Task, split_name
from grappe.training.run import SCORES, Run
from grappe.training.task_reference import TaskReference, resolve_task
from grappe.verbs.load import choose, data_of

if TYPE_CHECKING:
    from grappe.plan import Rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """The input of an evaluation's processes."""

    run: Path
    task: TaskReference
    plan: Plan
    split: str
    data: Path
    step: int
    """Of the checkpoint, which has been verified."""
    trained: bool = False
    rounding: Rounding = "fp32"


def evaluate(
    run: Run | Path | str,
    split: str = "validation",
    plan: AnyPlan = "",
    *,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    checkpoint: int | str | None = None,
    trained: bool = False,
    rounding: Rounding = "fp32",
) -> Scores:
    """Evaluates one of a run's checkpoints on `split`, under any plan; the scores name the checkpoint.

    The run's folder keeps the last scores of each split, for reports.

    If a newer checkpoint is passed over, a message on standard error names it, too.

    Args:
        task: needed where the run was not trained here by this user: no code is run because a run names it. An
            instance, a class, or a name as on the command line.
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        trained: take the weights themselves where the run keeps a moving average (`ema`).
        rounding: "bf16" or "int8": score the weights that `grappe export --weights` would write.

    Raises:
        GrappeError: the run, its task or the split cannot be found.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in SPLITS:
        raise UsageError(f"split={split}: {nearest(split, SPLITS)}")
    reference = resolve_task(run, task)
    choice, chosen = choose(run, checkpoint)
    request = EvaluateRequest(
        run=run.folder,
        task=reference,
        plan=as_plan(plan),
        split=split,
        data=data_of(run, data),
        step=chosen.step,
        trained=trained,
        rounding=rounding,
    )
    scores = start("grappe.verbs.evaluate:worker", request, request.plan, run=run.folder)
    if rounding == "fp32" and not trained:
        with contextlib.suppress(OSError, RunError):  # another user's run
            kept = read_json(run.folder / SCORES) if files.kind(run.folder / SCORES) else {}
            scored = {"samples": scores.samples, "loss": scores.loss, "metrics": scores.metrics}
            write_json(run.folder / SCORES, {**kept, split: {**scored, "checkpoint": chosen.folder.name}})
    return dataclasses.replace(scores, checkpoint=chosen.folder.name, why=choice.reason)


def worker(request: EvaluateRequest, process: ProcessRank, rendezvous_folder: Path) -> Scores:
    """Runs one process of an evaluation. Collective."""
    from grappe import engines
    from grappe.checkpoint.rounding import rounded
    from grappe.data import loader
    from grappe.data.datasets import dataset_of, prepare
    from grappe.engines.base import EngineSetup

    plan = request.plan
    with joined(plan, process, rendezvous_folder) as world:
        task = request.task.resolve()
        prepare(task, request.data, world)
        batches = loader.evaluation_loader(task, dataset_of(task, request.split, request.data), plan, world)
        folder = step_folder(Run(request.run).checkpoints, request.step)
        weights = Checkpoint(folder=folder, step=request.step).read_model(averaged=not request.trained)
        with naming_user_line(task):
            setup = EngineSetup(
                task=task,
                plan=plan,
                world=world,
                weights=rounded(weights, request.rounding),
                total_steps=1,
                sample_inputs=batches.example(),
            )
            with engines.running(setup) as engine:
                scores = engine.evaluate(batches.batches(0, batches.order.steps_per_epoch), batches.order.length)
                return dataclasses.replace(scores, split=split_name(task, request.split))
