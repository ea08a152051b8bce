"""grappe.load: a run's trained model, ready to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grappe import tasks
from grappe.errors import RunError
from grappe.task import Task
from grappe.training.run import Run

if TYPE_CHECKING:
    from torch import nn

    from grappe.checkpoint.format import Checkpoint


def load(run: Run | Path | str, task: Task | None = None, *, trained: bool = False) -> nn.Module:
    """Loads the model of a run's newest checkpoint, on the CPU, in evaluation mode.

    Args:
        task: needed where the run's task came from a notebook or a script, and has no name to find it by.
        trained: take the weights themselves where the run keeps a moving average (`ema`).

    Raises:
        RunError: the folder is no run, or it has no checkpoint that verifies.
        TaskError: the run's task cannot be found.
    """
    import torch

    from grappe.parallel.materialise import fill

    run = run if isinstance(run, Run) else Run(run)
    task = task or task_of(run)
    model = task.model()
    fill(model, newest(run).read_model(averaged=not trained), torch.device("cpu"))
    return model.eval()


def newest(run: Run) -> Checkpoint:
    """The newest checkpoint that verifies.

    Raises:
        RunError: there is none.
    """
    found = run.latest()
    if found is None:
        raise RunError(
            f"{run.folder} has no checkpoint that verifies: train it first, or look with: grappe runs RUN"
        )
    return found


def task_of(run: Run) -> Task:
    """The task that a run's description names, with the run's fields.

    Raises:
        TaskError: it cannot be found.
        RunError: the description is not usable, or names a file inside the run itself.
    """
    known = run.read_description()
    name, values = known.get("task"), known.get("fields")
    if not isinstance(name, str) or not isinstance(values, dict):
        raise RunError(f"{run.folder}/run.json does not say what its task is")
    place = name.partition(":")[0]
    if place.endswith(".py") and Path(place).resolve().is_relative_to(run.folder.resolve()):
        # A run that somebody sent must not bring code of its own.
        raise RunError(f"{run.folder}/run.json names a task file inside the run: refused, nothing was run")
    texts = {field: "none" if value is None else str(value) for field, value in values.items()}
    return tasks.make(tasks.find(name), texts)
