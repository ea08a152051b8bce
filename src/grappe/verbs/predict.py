"""grappe predict: computes the outputs of a run's model, one per sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import DataError, UsageError
from grappe.errors.user_code import naming_user_line, user_call
from grappe.task import Task
from grappe.training.run import Run
from grappe.verbs.load import load, task_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

SPLITS = ("train", "validation", "test")
BATCH = 256


def predict(
    run: Run | Path | str, inputs: Any, *, task: Task | None = None, data: Path | str | None = None
) -> Iterator[Tensor]:
    """Yields the model's output for each sample, on the CPU, one tensor per sample.

    Args:
        inputs: a split's name, a .npy file of samples in the form of the task's data (first dimension N), or a
            tensor or array of that form.

    Raises:
        DataError: the file is not a plain array, or the model cannot take it.
    """
    import torch

    run = run if isinstance(run, Run) else Run(run)
    if isinstance(inputs, str | Path) and str(inputs) not in SPLITS:
        inputs = _read(Path(inputs))
    task = task or task_of(run)
    model = load(run, task)
    with torch.no_grad(), naming_user_line(task):
        for batch in _batches(task, run, inputs, data):
            yield from _output(model, batch)


def _batches(task: Task, run: Run, inputs: Any, data: Path | str | None) -> Iterator[Any]:
    import torch

    if isinstance(inputs, str | Path):
        folder = Path(data or run.read_description().get("data", "data"))
        dataset = user_call(task, "data", str(inputs), folder)
        for first in range(0, len(dataset), BATCH):
            samples = [dataset[index] for index in range(first, min(first + BATCH, len(dataset)))]
            yield task.collate(samples)[0]
        return
    whole = torch.as_tensor(inputs)
    if whole.dtype == torch.float64:
        whole = whole.float()  # what NumPy makes of any decimal number, and no model here has
    for first in range(0, len(whole), BATCH):
        yield whole[first : first + BATCH]


def _output(model: nn.Module, batch: Any) -> Tensor:
    import torch

    try:
        return model(batch)
    except (RuntimeError, ValueError, IndexError) as error:
        if not isinstance(batch, torch.Tensor):
            raise
        kind = str(batch.dtype).removeprefix("torch.")
        raise DataError(
            f"the model does not take inputs of shape {['N', *batch.shape[1:]]} and type {kind}: {error}"
        ) from error


def _read(file: Path) -> np.ndarray:
    import numpy as np

    if file.suffix != ".npy":
        raise UsageError(f"{file}: give a .npy file of inputs, or one of {', '.join(SPLITS)}")
    try:
        found = np.load(file, allow_pickle=False)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, MemoryError) as error:
        raise DataError(
            f"{file} is not a plain array of numbers (Python objects are refused, since reading them could run "
            "code): write it with numpy.save from an array of numbers"
        ) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf" or not found.ndim:
        raise DataError(f"{file} should hold an array of numbers [N, ...]")
    return found
