"""grappe predict: what a run's model says of inputs, one line a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import DataError, UsageError
from grappe.run import Run
from grappe.task import Task
from grappe.verbs.load import load, task_of
from grappe.verbs.session import user_call

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "validation", "test")
BATCH = 256


def predict(
    run: Run | Path | str, inputs: Any, *, task: Task | None = None, data: Path | str | None = None
) -> Iterator[Tensor]:
    """The model's output for each sample, on the CPU, one tensor a sample.

    Args:
        inputs: a split's name, a .npy file of samples as the task's data gives them (first dimension N), or a
            tensor or array of that form.

    Raises:
        DataError: the file is not a plain array.
    """
    import torch

    run = run if isinstance(run, Run) else Run(run)
    task = task or task_of(run)
    model = load(run, task)
    with torch.no_grad():
        for batch in _batches(task, run, inputs, data):
            yield from model(batch)


def _batches(task: Task, run: Run, inputs: Any, data: Path | str | None) -> Iterator[Any]:
    import torch

    if isinstance(inputs, str) and inputs in SPLITS:
        dataset = user_call(task, "data", inputs, Path(data or run.description.get("data", "data")))
        for first in range(0, len(dataset), BATCH):
            samples = [dataset[index] for index in range(first, min(first + BATCH, len(dataset)))]
            yield task.collate(samples)[0]
        return
    whole = torch.as_tensor(_read(Path(inputs)) if isinstance(inputs, str | Path) else inputs)
    for first in range(0, len(whole), BATCH):
        yield whole[first : first + BATCH]


def _read(file: Path) -> Any:
    import numpy as np

    if file.suffix != ".npy":
        raise UsageError(f"{file}: give a .npy file of inputs, or one of {', '.join(SPLITS)}")
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a plain array of numbers: {error}") from error
