"""grappe predict: computes the outputs of a run's model, one per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import DataError, TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line, user_call
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_record import given
from grappe.verbs.load import data_of, load

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

SPLITS = ("train", "validation", "test")
BATCH = 256


def predict(
    run: Run | Path | str,
    inputs: Any,
    *,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    checkpoint: int | str | None = None,
    taken: Callable[[str], object] = str,
) -> Iterator[Tensor]:
    """Yields the model's output for each sample, on the CPU, one tensor per sample.

    Where a newer checkpoint is passed over, that is said on standard error.

    Args:
        inputs: a split's name, a .npy file of samples in the form of the task's data (first dimension N), or a
            tensor or array of that form.
        task: needed where the run was not trained here by this user, as for grappe.load.
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        taken: called with the name of the checkpoint that was taken.

    Raises:
        DataError: the file is not a plain array, or the model cannot take it.
    """
    import torch

    run = run if isinstance(run, Run) else Run(run)
    if isinstance(inputs, str | Path) and str(inputs) not in SPLITS:
        inputs = _read(Path(inputs))
    made = given(run, task).resolve()
    model = load(run, made, checkpoint=checkpoint)
    taken(Path(str(model.grappe_checkpoint)).name)
    with torch.no_grad(), naming_user_line(made):
        for batch in _batches(made, run, inputs, data):
            yield from _output(model, batch)


def answer(output: Tensor) -> dict[str, Any]:
    """Formats one sample's output: of several decimal numbers the likeliest class; else the numbers themselves.

    A number that is not finite is None, as JSON has no other word for it.
    """
    if output.dim() == 1 and output.numel() > 1 and output.is_floating_point():
        best, probability = int(output.argmax()), float(output.float().softmax(0).max())
        return {"class": best, "probability": _finite(round(probability, 6))}
    return {"output": _finite(output.tolist())}


def write(outputs: Iterator[Tensor], file: Path) -> None:
    """Writes outputs to a .npy file, as one array [N, ...].

    Raises:
        DataError: there is none, or they have several shapes.
    """
    import numpy as np
    import torch

    found = list(outputs)
    if not found or any(one.shape != found[0].shape for one in found):
        why = "they have several shapes" if found else "there is no sample"
        raise DataError(f"the outputs are no array, since {why}: leave --out away to see them")
    whole = torch.stack(found)
    np.save(file, (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _batches(task: Task, run: Run, inputs: Any, data: Path | str | None) -> Iterator[Any]:
    from grappe.data.loader import check, inputs_of
    from grappe.data.seeded import SeededDataset

    if isinstance(inputs, str | Path):
        dataset = user_call(task, "data", str(inputs), data_of(run, data))
        length = check(dataset, str(inputs), task)
        seeded = SeededDataset(dataset, seed=task.seed)  # as evaluation has them
        for first in range(0, length, BATCH):
            samples = seeded.__getitems__([(-1, index) for index in range(first, min(first + BATCH, length))])
            yield inputs_of(task, task.collate(samples))
        return
    for first in range(0, len(inputs), BATCH):
        yield _tensor(inputs[first : first + BATCH])


def _tensor(inputs: Any) -> Tensor:
    """A tensor of any array of numbers: of the other byte order, or of more bits than torch has, too."""
    import numpy as np
    import torch

    if isinstance(inputs, np.ndarray):
        kind = np.dtype(np.float64) if inputs.dtype.kind == "f" and inputs.itemsize > 8 else inputs.dtype
        inputs = np.array(inputs, kind.newbyteorder("="))  # a copy: the file stays as it is
    whole = torch.as_tensor(inputs)
    return whole.float() if whole.dtype == torch.float64 else whole  # no model here has float64


def _output(model: nn.Module, batch: Any) -> Tensor:
    import torch

    try:
        output = model(batch)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if not isinstance(batch, torch.Tensor):
            raise
        kind = str(batch.dtype).removeprefix("torch.")
        raise DataError(
            f"the model does not take inputs of shape {['N', *batch.shape[1:]]} and type {kind}: "
            f"{printable(error, 500)}"
        ) from error
    if not isinstance(output, torch.Tensor) or output.is_nested or output.layout != torch.strided:
        raise TaskError(
            f"the model gives {type(output).__name__}, and grappe predict shows plain tensors [N, ...]: "
            "call the model in Python, with model = grappe.load(run)"
        )
    if isinstance(batch, torch.Tensor) and (not output.dim() or len(output) != len(batch)):
        raise TaskError(
            f"the model gives an output of shape {list(output.shape)} for {len(batch)} samples: grappe predict shows "
            "one output for each sample. Call the model in Python, with model = grappe.load(run)"
        )
    if not output.dim():
        raise TaskError(
            "the model gives one number for all samples: grappe predict shows one output for each"
        )
    return output.dequantize() if output.is_quantized else output


def _read(file: Path) -> np.ndarray:
    import numpy as np

    if file.suffix != ".npy":
        raise UsageError(f"{file}: give a .npy file of inputs, or one of {', '.join(SPLITS)}")
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is no file")  # reading from a pipe would wait for ever
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)  # mapped: its header cannot ask for memory
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # its header is Python's text, and may be any
        raise DataError(
            f"{file} is not a plain array of numbers (Python objects are refused, since reading them could run "
            "code): write it with numpy.save from an array of numbers"
        ) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf" or not found.ndim:
        raise DataError(f"{file} should hold an array of numbers [N, ...]")
    return found
