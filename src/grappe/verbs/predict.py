"""grappe predict: computes a run's predictions, one per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import DataError, TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.errors.native_code import refuse_package
from grappe.errors.user_code import naming_user_line
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_record import given
from grappe.verbs.load import data_of, load

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn
    from torch.utils.data import Dataset

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
    trained: bool = False,
) -> Iterator[Any]:
    """Yields what the task's `prediction` gives for each sample, on the CPU: the model's output, if it has none.

    Where a newer checkpoint is passed over, that is said on standard error.

    Args:
        inputs: a split's name, a .npy file of samples in the form of the task's data (first dimension N), or a
            tensor or array of that form.
        task: needed where the run was not trained here by this user, as for grappe.load.
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        taken: called with the name of the checkpoint that was taken.
        trained: take the weights themselves where the run keeps a moving average (`ema`).

    Raises:
        DataError: the file is not a plain array, or the model cannot take it.
        TaskError: the output has not a row for each sample.
    """
    import numpy as np
    import torch

    from grappe.data.batch import SampleIds
    from grappe.data.rand_like import inside

    run = run if isinstance(run, Run) else Run(run)
    if isinstance(inputs, str | Path) and str(inputs) not in SPLITS:
        inputs = _read(Path(inputs))
    made = given(run, task).resolve()
    model = load(run, made, checkpoint=checkpoint, trained=trained)
    taken(Path(str(model.grappe_checkpoint)).name)
    batches = _batches(made, run, inputs, data)
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


def _batches(task: Task, run: Run, inputs: Any, data: Path | str | None) -> Iterator[tuple[Any, int]]:
    """Yields inputs of the model, and their number of samples."""
    if isinstance(inputs, str | Path):
        yield from _of_split(task, str(inputs), data_of(run, data))
        return
    for first in range(0, len(inputs), BATCH):
        part = inputs[first : first + BATCH]
        yield _tensor(part), len(part)


def _tensor(inputs: Any) -> Tensor:
    """Makes a tensor of any array of numbers: of the other byte order, or of more bits than torch has, too."""
    import numpy as np
    import torch

    if isinstance(inputs, np.ndarray):
        kind = np.dtype(np.float64) if inputs.dtype.kind == "f" and inputs.itemsize > 8 else inputs.dtype
        inputs = np.array(inputs, kind.newbyteorder("="))  # a copy: the file stays as it is
    whole = torch.as_tensor(inputs)
    return whole.float() if whole.dtype == torch.float64 else whole  # no model here has float64


def _of_split(task: Task, split: str, folder: Path) -> Iterator[tuple[Any, int]]:
    import numpy as np

    from grappe.data.prepare import dataset_of, prepare

    prepare(task, folder)
    dataset = dataset_of(task, split, folder)
    read = split_reader(task, dataset)
    size = min(BATCH, task.batch_size)
    for first in range(0, len(dataset), size):
        ids = np.arange(first, min(first + size, len(dataset)))
        yield read(ids), len(ids)


def split_reader(task: Task, dataset: Dataset) -> Callable[[np.ndarray], Any]:
    """Returns what reads the samples with given ids [B] as a batch of the model's inputs."""
    import torch

    from grappe.data.arrays import in_memory
    from grappe.data.collate import augment, augments, collated
    from grappe.data.draw import sample_keys
    from grappe.data.seeded import SeededDataset

    arrays, seeded = in_memory(dataset), SeededDataset(dataset, seed=task.seed)

    def read(ids: np.ndarray) -> Any:
        if arrays is not None:
            inputs, targets = arrays.gather(ids)
        else:
            inputs, targets = collated(task, seeded.__getitems__([(-1, int(one)) for one in ids]))
        if augments(task, training=False):
            keys = torch.from_numpy(sample_keys(task.seed, -1, ids))
            inputs, targets = augment(task, inputs, targets, keys, training=False)
        return inputs

    return read


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


def save(file: Path, predictions: Iterable[Any]) -> None:
    """Writes predictions [N, ...]: to a .npy file where each is a tensor, to a .npz file where each is a dict.

    Raises:
        DataError: there is none.
        UsageError: they are neither, or of several shapes.
    """
    import numpy as np
    import torch

    found = list(predictions)
    if not found:
        raise DataError(f"--out {file}: there is no sample")
    fields = found[0] if isinstance(found[0], dict) else {"": found[0]}
    try:
        columns = {
            name: _array(torch.stack([torch.as_tensor(one[name] if name else one) for one in found]))
            for name in fields
        }
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(
            f"--out {file}: predictions of several forms or shapes make no array ({error}): leave --out away, and "
            "keep the lines of JSON"
        ) from error
    if file.suffix == ".npz":
        arrays: dict[str, Any] = {name or "output": column for name, column in columns.items()}
        np.savez(file, **arrays)
    elif list(columns) == [""]:
        np.save(file, columns[""])
    else:
        raise UsageError(
            f"--out {file}: predictions have {', '.join(columns)}: give a file that ends in .npz"
        )


def _array(whole: Tensor) -> np.ndarray:
    import torch

    return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()  # NumPy has no bfloat16


def _read(file: Path) -> np.ndarray:
    import numpy as np

    refuse_package(file)
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
