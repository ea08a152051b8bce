"""grappe.load: loads a run's trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grappe import tasks
from grappe.errors import RunError
from grappe.errors.user_code import naming_user_line
from grappe.task import Task
from grappe.training.run import Run

if TYPE_CHECKING:
    from torch import nn

    from grappe.checkpoint.format import Checkpoint


def load(run: Run | Path | str, task: Task | None = None) -> nn.Module:
    """Loads the model of a run's newest checkpoint, on the CPU, in evaluation mode.

    Args:
        task: needed if the run's task was passed by value from a notebook or a script, and cannot be found by name.

    Raises:
        RunError: the folder is no run, or has no checkpoint that verifies.
        TaskError: the run's task cannot be found.
    """
    import torch

    from grappe.parallel.materialise import fill
    from grappe.step.given import model_of

    run = run if isinstance(run, Run) else Run(run)
    task = task or task_of(run)
    with naming_user_line(task):
        model = model_of(task)
    fill(model, newest(run).read_model(), torch.device("cpu"))
    return model.eval()


def newest(run: Run) -> Checkpoint:
    """Finds the newest checkpoint that verifies.

    Raises:
        RunError: there is no such checkpoint.
    """
    found = run.latest()
    if found is None:
        raise RunError(
            f"{run.folder} has no checkpoint that verifies: train it first, or look with: grappe runs RUN"
        )
    return found


def data_of(run: Run, given: Path | str | None) -> Path:
    """Where a run's data are: in the folder that is given, else in the one that its description names."""
    named = run.read_description().get("data")
    return Path(given or (named if isinstance(named, str) and named else "data"))


def task_of(run: Run) -> Task:
    """Finds the task that a run's description names, with the run's fields.

    Raises:
        TaskError: the task cannot be found.
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
