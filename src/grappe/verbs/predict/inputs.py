"""Reads the inputs of grappe predict, a batch at a time: a split, an array, JSON lines or pictures, JPEG or PNG.

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
from grappe.verbs.predict import lines

if TYPE_CHECKING:
    from torch.utils.data import Dataset


from collections.abc import Sequence

from torch.utils.data import Dataset

from grappe.data.draw import mix
from grappe.data.images.dataset import Images
from grappe.data.images.decode import NoPicture, decoded, header_of
from grappe.errors.foreign_text import printable

BATCH = 256
BATCH_BYTES = 1 << 26
"""Of an array's batch: large samples come in smaller batches."""

Batches = Iterator[tuple[Any, int]]
"""Inputs of the model, and their number of samples."""
Source = Callable[[Task, Callable[[], Path]], Batches]
"""From a task and what gives its data folder to batches."""
PICTURES = (".jpg", ".jpeg", ".png")
CHANNELS = {1: "L", 3: "RGB"}
LARGEST = 1 << 28  # bytes of a file
Decode = Callable[[bytes], Tensor]


def source_of(inputs: Any) -> Source:
    """Returns what reads `inputs`, as grappe.predict takes them.

    Raises:
        DataError: the file is not a plain array, or there is no picture.
        UsageError: it is of another kind.
    """
    files = files_of(inputs)
    if files is not None:
        return lambda task, data: _of_dataset(task, picture_dataset(task, files, _example(task, data())))
    if not isinstance(inputs, str | Path):
        return lambda task, data: _of_array(inputs)
    if str(inputs) in SPLITS:
        return lambda task, data: _of_dataset(task, _split(task, str(inputs), data()))
    file = Path(inputs)
    refuse_package(file)
    if str(inputs) == lines.STDIN or file.suffix in lines.SUFFIXES:
        stream = lines.opened(file)
        return lambda task, data: lines.batches(stream, str(file), _first(task, data()))
    if file.suffix == ".npy":
        array = _read(file)
        return lambda task, data: _of_array(array)
    raise UsageError(
        f"{file}: give one of {', '.join(SPLITS)}, a .npy file, JSON lines "
        f"({', '.join(lines.SUFFIXES)}, or - for the standard input), or pictures "
        f"({', '.join(PICTURES)}, or a folder of them)"
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
            inputs, targets = collated(task, seeded.__getitems__([(-1, int(index)) for index in ids]))
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
    tensor = torch.as_tensor(inputs)
    return tensor.float() if tensor.dtype == torch.float64 else tensor  # no model here has float64


def _read(file: Path) -> np.ndarray:
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is no file")  # reading from a pipe would wait for ever
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)  # mapped: its header cannot ask for memory
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # its header is Python's text, and may be any
        raise DataError(
            f"{file} is not a plain array of numbers (Python objects are refused, since reading them could run "
            "code): write it with numpy.save from an array of numbers"
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or not array.ndim:
        raise DataError(f"{file} should hold an array of numbers [N, ...]")
    return array


def files_of(inputs: Any) -> list[Path] | None:
    """Lists the pictures that `inputs` names: one, several, or a folder's by name; None if it names none.

    A split's name is never a folder: `./validation`, or a Path, names the folder.

    Raises:
        DataError: the folder has none.
        UsageError: one of several files is no picture.
    """
    if isinstance(inputs, str) and inputs in SPLITS:
        return None
    if isinstance(inputs, str | Path):
        path = Path(inputs)
        if path.is_dir() and path.suffix not in (".npy", ".jsonl", ".ndjson"):
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
            if not files:
                raise DataError(f"{path}: there is no picture in this folder ({', '.join(PICTURES)})")
            return files
        return [path] if path.suffix.lower() in PICTURES else None
    if (
        not isinstance(inputs, list | tuple)
        or not inputs
        or not all(isinstance(file, str | Path) for file in inputs)
    ):
        return None
    files = [Path(file) for file in inputs]
    for file in files:
        if file.suffix.lower() not in PICTURES:
            raise UsageError(
                f"{file}: several inputs are pictures ({', '.join(PICTURES)}): give others one at a time"
            )
    return files


def picture_dataset(task: Task, files: Sequence[Path], example: Any) -> Dataset:
    """Returns the pictures as samples of a task, whose data `example` are.

    Raises:
        DataError: the task's data are no pictures.
    """
    if isinstance(example, Images):
        view = example.view
        return _Pictures(files, lambda data: view(data, mix(torch.initial_seed(), 0)))
    arrays = in_memory(example)
    stored = None if arrays is None else arrays.stored(np.arange(1))[0]
    if (
        arrays is None
        or not isinstance(stored, Tensor)
        or stored.dtype != torch.uint8
        or stored.dim() not in (3, 4)
    ):
        raise DataError(
            f"{type(task).__name__}'s data do not say how a picture becomes a sample: they are neither "
            "grappe.data.Images nor Arrays of uint8 [N, C, H, W]. Give samples as a .npy file"
        )
    shape, transform = stored.shape[1:], arrays.transform or (lambda batch: batch)
    return _Pictures(files, lambda data: transform(_pixels(data, shape)[None])[0])


class _Pictures(Dataset[tuple[Tensor, int]]):
    """Pairs of a picture's sample and 0: nobody asks for its label."""

    def __init__(self, files: Sequence[Path], decode: Decode) -> None:
        self.files, self.decode = files, decode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        try:
            if not file.is_file():
                raise DataError(f"{file} is no file")
            with file.open("rb") as stream:
                content = stream.read(LARGEST)
            return self.decode(content), 0
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
        except (NoPicture, _Unfit) as error:
            raise DataError(f"{file}: {printable(error)}") from None


class _Unfit(ValueError):
    """A picture is of another size than the task's."""


def _pixels(data: bytes, shape: torch.Size) -> Tensor:
    """Decodes a file to uint8 of `shape`, [C, H, W] or [H, W]."""
    from PIL import Image

    channels, (height, width) = (shape[0] if len(shape) == 3 else 1), shape[-2:]
    if channels not in CHANNELS:
        raise _Unfit(
            f"the task's samples have {channels} channels, and pictures have 1 or 3: give a .npy file"
        )
    header = header_of(data)
    if (header.height, header.width) != (height, width):
        raise _Unfit(
            f"it has {header.width} x {header.height} pixels, and the task's samples {width} x {height}: resize it"
        )
    pixels = Image.fromarray(decoded(data, header)).convert(CHANNELS[channels])
    values = torch.from_numpy(np.array(pixels))
    return values.reshape(shape) if channels == 1 else values.permute(2, 0, 1).contiguous()
