"""grappe predict: computes a run's predictions, one per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import DataError, TaskError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_record import resolve_task
from grappe.verbs.load import data_of, load

if TYPE_CHECKING:
    from torch import nn


def predict(
    run: Run | Path | str,
    inputs: Any,
    *,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    checkpoint: int | str | None = None,
    taken: Callable[[str], object] = str,
    trained: bool = False,
) -> Iterator[Any]:
    """Yields what the task's `prediction` gives for each sample, on the CPU: the model's output, if it has none.

    Where a newer checkpoint is passed over, that is said on standard error.

    Args:
        inputs: a split's name; a .npy file of samples in the form of the model's inputs (first dimension N), or a
            tensor or array of that form; a file of JSON lines with a sample each, "-" for the standard input; a
            picture, JPEG or PNG, a folder of them, or a list of their files. It is read a batch at a time.
        task: needed where the run was not trained here by this user, as for grappe.load.
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        taken: called with the name of the checkpoint that was taken.
        trained: take the weights themselves where the run keeps a moving average (`ema`).

    Raises:
        DataError: a file has no samples of the model's, or the model cannot take them.
        UsageError: `inputs` is none of these.
        TaskError: the output has not a row for each sample.
    """
    import numpy as np
    import torch

    from grappe.data.batch import SampleIds
    from grappe.data.rand_like import inside
    from grappe.verbs.prediction_inputs import source_of

    run = run if isinstance(run, Run) else Run(run)
    source = source_of(inputs)
    made = resolve_task(run, task).resolve()
    model = load(run, made, checkpoint=checkpoint, trained=trained)
    taken(Path(str(model.grappe_checkpoint)).name)
    with naming_user_line(made):
        batches = source(made, lambda: data_of(run, data))
    done = 0
    while True:
        # Left before each yield: else gradients would be off in the code that asks for the predictions.
        with torch.no_grad(), naming_user_line(made):
            found = next(batches, None)
            if found is None:
                return
            batch, count = found
            with inside(SampleIds(made.seed, -1, np.arange(done, done + count))):
                output = made.prediction(_output(made, model, batch))
            cut = list(rows(output, count, type(made).__name__))
            done += count
        yield from cut


def _output(task: Task, model: nn.Module, batch: Any) -> Any:
    import torch

    from grappe.private_api.torch import tree_map

    try:
        return tree_map(_plain_tensor, task.forward(model, batch))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if not isinstance(batch, torch.Tensor):
            raise
        kind = str(batch.dtype).removeprefix("torch.")
        raise DataError(
            f"the model does not take inputs of shape {['N', *batch.shape[1:]]} and type {kind}: "
            f"{printable(error, 500)}"
        ) from error


def _plain_tensor(value: Any) -> Any:
    """Returns the numbers of a quantized tensor, and anything else as it is.

    Raises:
        TaskError: the tensor is nested or sparse.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if value.is_nested or value.layout != torch.strided:
        raise TaskError(
            "the model gives a nested or sparse tensor, and grappe predict shows plain tensors [N, ...]: give the task "
            "a prediction(self, output) that makes one, or call the model in Python, with model = grappe.load(run)"
        )
    return value.dequantize() if value.is_quantized else value


def rows(batch: Any, count: int, name: str) -> Iterator[Any]:
    """Cuts a batch of predictions by row, however they nest.

    Raises:
        TaskError: a tensor in it has no row for each of `count` samples.
    """
    if isinstance(batch, list) and len(batch) == count and not _is_cuttable(batch, count):
        yield from batch  # one a sample already: boxes, texts
        return
    for row in range(count):
        yield _row(batch, row, count, name)


def _is_cuttable(batch: list[Any], count: int) -> bool:
    import torch

    from grappe.private_api.torch import tree_leaves

    leaves = tree_leaves(batch)
    return bool(leaves) and all(
        isinstance(one, torch.Tensor) and one.dim() and len(one) == count for one in leaves
    )


def _row(value: Any, row: int, count: int, name: str) -> Any:
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        if shape[0] != count:
            raise TaskError(
                f"the output of {name}'s model has {list(shape)}, no row for each of {count} samples: give {name} a "
                "prediction(self, output) that makes some, or a list with one prediction a sample"
            )
        return value[row]
    if isinstance(value, Mapping):
        return {key: _row(one, row, count, name) for key, one in value.items()}
    if isinstance(value, list) and len(value) == count and not _is_cuttable(value, count):
        return value[row]
    if isinstance(value, tuple | list):
        return [_row(one, row, count, name) for one in value]
    return value  # a number or word of the whole batch


def as_json(prediction: Any) -> dict[str, Any]:
    """A prediction's fields for a line of JSON: those of a dict, else `output`."""
    plain = _plain(prediction)
    return plain if isinstance(plain, dict) else {"output": plain}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if hasattr(value, "tolist"):  # a tensor, an array, a number of NumPy's
        if getattr(value, "is_meta", False):
            raise TaskError(
                "a prediction is a tensor on the device meta, which has no numbers: give a real one"
            )
        return _finite(value.tolist())
    if value is None or isinstance(value, str | int | float | bool | complex):
        return _finite(value)
    raise TaskError(
        f"a prediction is a {type(value).__name__}, which cannot be written as JSON: let prediction() give tensors, "
        "numbers and texts, in dicts and lists"
    )


def _finite(value: Any) -> Any:
    """Replaces what JSON has no word for: a number that is not finite by None, a complex one by a pair."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
