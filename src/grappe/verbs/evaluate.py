"""grappe evaluate: a run's scores on a split, every sample counted once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.checkpoint.commit import read_json, write_json
from grappe.checkpoint.format import Checkpoint, step_folder
from grappe.errors import GrappeError, RunError, UsageError, nearest
from grappe.launch import files
from grappe.launch.start import start
from grappe.launch.terminal import complain
from grappe.plan import AnyPlan, as_plan
from grappe.step.scores import Scores
from grappe.task import SPLITS, Task, split_name
from grappe.training.run import SCORES, Run
from grappe.training.short_run import TaskProcess, short_run
from grappe.training.task_reference import resolve_task
from grappe.verbs.load import choose, data_of

if TYPE_CHECKING:
    from grappe.plan import Rounding


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
    launcher = functools.partial(start, run=run.folder)
    while True:
        choice, chosen = choose(run, checkpoint)
        work = functools.partial(checkpoint_scores, run.folder, chosen.step, split, trained, rounding)
        try:
            scores = short_run(work, reference, as_plan(plan), data_of(run, data), run=launcher)
            break
        except GrappeError:  # of a training that runs, which keeps its newest checkpoints
            if chosen.folder.exists() or checkpoint not in (None, "last", "best"):
                raise
            complain(f"grappe: the training has removed {chosen.folder.name} meanwhile: evaluating a newer one")
    if rounding == "fp32" and not trained:
        with contextlib.suppress(OSError, RunError):  # another user's run
            kept = read_json(run.folder / SCORES) if files.kind(run.folder / SCORES) else {}
            scored = {"samples": scores.samples, "loss": scores.loss, "metrics": scores.metrics}
            write_json(run.folder / SCORES, {**kept, split: {**scored, "checkpoint": chosen.folder.name}})
    return dataclasses.replace(scores, checkpoint=chosen.folder.name, why=choice.reason)


def checkpoint_scores(
    run: Path, step: int, split: str, trained: bool, rounding: Rounding, process: TaskProcess
) -> Scores:
    """Evaluates the checkpoint of a step, which has been verified. Collective."""
    from grappe.checkpoint.weights import rounded
    from grappe.data import loader
    from grappe.data.datasets import dataset_of

    task = process.task
    batches = loader.evaluation_loader(task, dataset_of(task, split, process.data), process.plan, process.world)
    folder = step_folder(Run(run).checkpoints, step)
    weights = Checkpoint(folder=folder, step=step).read_model(averaged=not trained)
    with process.engine(task, batches, 1, weights=rounded(weights, rounding)) as engine:
        scores = engine.evaluate(batches.batches(0, batches.order.steps_per_epoch), batches.order.length)
        return dataclasses.replace(scores, split=split_name(task, split))
