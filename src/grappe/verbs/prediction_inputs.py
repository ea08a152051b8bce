"""Reads what grappe predict is given, a batch at a time: a split, arrays, JSON lines or pictures.

Shapes: B samples of a batch; pictures of C x H x W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grappe.data.arrays import in_memory
from grappe.data.collate import augment, augments, collated
from grappe.data.draw import sample_keys
from grappe.data.prepare import dataset_of, prepare
from grappe.data.seeded import SeededDataset
from grappe.errors import DataError, UsageError
from grappe.errors.native_code import refuse_package
from grappe.task import SPLITS, Task
from grappe.verbs import prediction_lines, prediction_pictures

if TYPE_CHECKING:
    from torch.utils.data import Dataset

BATCH = 256
BATCH_BYTES = 1 << 26
"""Of an array's batch: large samples come in smaller batches."""

Batches = Iterator[tuple[Any, int]]
"""Inputs of the model, and their number of samples."""
Source = Callable[[Task, Callable[[], Path]], Batches]
"""From a task and what gives its data folder to batches."""


def source_of(inputs: Any) -> Source:
    """Returns what reads `inputs`, as grappe.predict takes them.

    Raises:
        DataError: the file is not a plain array, or there is no picture.
        UsageError: it is of another kind.
    """
    files = prediction_pictures.files_of(inputs)
    if files is not None:
        return lambda task, data: _of_dataset(
            task, prediction_pictures.dataset(task, files, _example(task, data()))
        )
    if not isinstance(inputs, str | Path):
        return lambda task, data: _of_array(inputs)
    if str(inputs) in SPLITS:
        return lambda task, data: _of_dataset(task, _split(task, str(inputs), data()))
    file = Path(inputs)
    refuse_package(file)
    if str(inputs) == prediction_lines.STDIN or file.suffix in prediction_lines.SUFFIXES:
        stream = prediction_lines.opened(file)
        return lambda task, data: prediction_lines.batches(stream, str(file), _first(task, data()))
    if file.suffix == ".npy":
        array = _read(file)
        return lambda task, data: _of_array(array)
    raise UsageError(
        f"{file}: give one of {', '.join(SPLITS)}, a .npy file, JSON lines "
        f"({', '.join(prediction_lines.SUFFIXES)}, or - for the standard input), or pictures "
        f"({', '.join(prediction_pictures.SUFFIXES)}, or a folder of them)"
    )


def _split(task: Task, split: str, folder: Path) -> Any:
    prepare(task, folder)
    return dataset_of(task, split, folder)


def _example(task: Task, folder: Path) -> Any:
    """Returns the task's validation data, which say how a file becomes a sample."""
    return _split(task, "validation", folder)


def _first(task: Task, folder: Path) -> Any:
    """Returns a batch of one sample of validation's: the form of the model's inputs."""
    return split_reader(task, _example(task, folder))(np.arange(1))


def batch_size(task: Task) -> int:
    """Returns the number of samples of a split that are predicted at a time."""
    return min(BATCH, task.batch_size)


def _of_dataset(task: Task, dataset: Any) -> Batches:
    read = split_reader(task, dataset)
    size = batch_size(task)
    for first in range(0, len(dataset), size):
        ids = np.arange(first, min(first + size, len(dataset)))
        yield read(ids), len(ids)


def split_reader(task: Task, dataset: Dataset) -> Callable[[np.ndarray], Any]:
    """Returns what reads the samples with given ids [B] as a batch of the model's inputs."""
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


def _of_array(array: Any) -> Batches:
    sample = array[:1]
    size = max(1, min(BATCH, BATCH_BYTES // max(1, getattr(sample, "nbytes", 1))))
    for first in range(0, len(array), size):
        part = array[first : first + size]
        yield _tensor(part), len(part)


def _tensor(inputs: Any) -> Tensor:
    """Makes a tensor of any array of numbers: of the other byte order, or of more bits than torch has, too."""
    if isinstance(inputs, np.ndarray):
        kind = np.dtype(np.float64) if inputs.dtype.kind == "f" and inputs.itemsize > 8 else inputs.dtype
        inputs = np.array(inputs, kind.newbyteorder("="))  # a copy: the file stays as it is
    whole = torch.as_tensor(inputs)
    return whole.float() if whole.dtype == torch.float64 else whole  # no model here has float64


def _read(file: Path) -> np.ndarray:
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
