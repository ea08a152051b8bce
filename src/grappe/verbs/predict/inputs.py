"""Reads the inputs of grappe predict, a batch at a time: a split, an array, JSON lines or pictures, JPEG or PNG.

Shapes: B samples of a batch; pictures of C x H x W.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from grappe.checkpoint.format import refuse_package
from grappe.data.arrays import in_memory
from grappe.data.collate import augment, collated, takes_training
from grappe.data.datasets import dataset_of, prepare
from grappe.data.draw import mix, sample_keys
from grappe.data.images.dataset import Images
from grappe.data.images.decode import NoPicture, decoded, header_of
from grappe.data.seeded import SeededDataset
from grappe.errors import DataError, UsageError, reading
from grappe.errors.foreign_text import printable
from grappe.launch.terminal import complain
from grappe.private_api.torch import tree_map
from grappe.task import SPLITS, Task

BATCH = 256
BATCH_BYTES = 1 << 26
"""Bytes of an array's batch at most: large samples are in smaller batches."""

Batches = Iterator[tuple[Callable[[], Any], int]]
"""Functions that read inputs of the model, with their number of samples."""
Source = Callable[[Task, Callable[[], Path]], Batches]
"""From a task and what gives its data folder to batches."""
PICTURES = (".jpg", ".jpeg", ".png")
CHANNELS = {1: "L", 3: "RGB"}
LARGEST = 1 << 28  # bytes of a file
STDIN = "-"
LINES, CSV = (".jsonl", ".ndjson"), ".csv"
PART = 1 << 20  # bytes of lines that are read at a time
LONGEST = 1 << 26  # bytes of a line
EXACT = 1 << 53  # up to which a float tells whole numbers apart
INTEGERS = "biu"  # NumPy's kinds of whole numbers
Decode = Callable[[bytes], Any]
ReadLine = Callable[[bytes, str], Any]
"""From a line and its place to a sample's value, as JSON has it, or HEADER."""
HEADER = object()


def source_of(inputs: Any, kind: torch.dtype = torch.float32) -> Source:
    """Returns what reads `inputs`, as grappe.predict takes them, for a model of this type.

    Raises:
        DataError: the file is not a plain array, or there is no picture.
        UsageError: it is of another kind.
    """
    files = files_of(inputs)
    if files is not None:
        return lambda task, data: _of_dataset(task, picture_dataset(task, files, _split(task, "validation", data())))
    if not isinstance(inputs, str | Path):
        return lambda task, data: _of_array(inputs, kind)
    if str(inputs) in SPLITS:
        return lambda task, data: _of_dataset(task, _split(task, str(inputs), data()))
    file = Path(inputs)
    refuse_package(file)
    if str(inputs) == STDIN or file.suffix in (*LINES, CSV):
        stream = open_lines(file)

        def of_lines(task: Task, data: Callable[[], Path]) -> Batches:
            dataset = _split(task, "validation", data())
            example, columns = split_reader(task, dataset)(np.arange(1)), _having(dataset, "columns") or ()
            read = _csv_reader(task, columns) if file.suffix == CSV else functools.partial(_of_json, columns=columns)
            batches = line_batches(stream, str(file), example, read)
            return ((lambda batch=batch: batch, count) for batch, count in batches)

        return of_lines
    if file.suffix == ".npy":
        array = _read(file)
        return lambda task, data: _of_array(array, kind)
    raise UsageError(
        f"{file}: give one of {', '.join(SPLITS)}, a .npy or .csv file, JSON lines ({', '.join(LINES)}, or - for the "
        f"standard input), or pictures ({', '.join(PICTURES)}, or a folder of them)"
    )


def _split(task: Task, split: str, folder: Path) -> Any:
    prepare(task, folder)
    return dataset_of(task, split, folder)


def _having(dataset: Any, name: str) -> Any:
    """Returns an attribute of a dataset, or of the one that it takes samples from; None: they have none."""
    while not hasattr(dataset, name) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, name, None)


def _of_dataset(task: Task, dataset: Any) -> Batches:
    read = split_reader(task, dataset)
    size = min(BATCH, task.batch_size)
    for first in range(0, len(dataset), size):
        ids = np.arange(first, min(first + size, len(dataset)))
        yield functools.partial(read, ids), len(ids)


def pair_reader(task: Task, dataset: Dataset) -> Callable[[np.ndarray], tuple[Any, Any]]:
    """Returns what reads the samples with given ids [B] as a batch of the model's inputs and their targets."""
    arrays, seeded = in_memory(dataset), SeededDataset(dataset, seed=task.seed)

    def read(ids: np.ndarray) -> tuple[Any, Any]:
        if arrays is not None:
            inputs, targets = arrays.gather(ids)
        else:
            inputs, targets = collated(task, seeded.__getitems__([(-1, int(index)) for index in ids]))
        if takes_training(task):
            keys = torch.from_numpy(sample_keys(task.seed, -1, ids))
            inputs, targets = augment(task, inputs, targets, keys, training=False)
        return inputs, targets

    return read


def split_reader(task: Task, dataset: Dataset) -> Callable[[np.ndarray], Any]:
    """Returns what reads the samples with given ids [B] as a batch of the model's inputs."""
    read = pair_reader(task, dataset)
    return lambda ids: read(ids)[0]


def _of_array(array: Any, stored: torch.dtype) -> Batches:
    sample = array[:1]
    size = max(1, min(BATCH, BATCH_BYTES // max(1, getattr(sample, "nbytes", 1))))

    def read(part: Any) -> Tensor:
        if isinstance(part, np.ndarray):  # also of the other byte order, or of more bits than torch has
            kind = np.dtype(np.float64) if part.dtype.kind == "f" and part.itemsize > 8 else part.dtype
            part = np.array(part, kind.newbyteorder("="))  # a copy: the file stays as it is
        tensor = torch.as_tensor(part)
        return tensor.to(stored) if tensor.dtype == torch.float64 else tensor

    for first in range(0, len(array), size):
        part = array[first : first + size]
        yield functools.partial(read, part), len(part)


def _read(file: Path) -> np.ndarray:
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is not a file")  # reading from a pipe would wait for ever
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
        if path.is_dir() and path.suffix not in (".npy", *LINES):
            files = _pictures_in(path)
            if not files:
                below = next((each for each in sorted(path.iterdir()) if each.is_dir() and _pictures_in(each)), None)
                raise DataError(
                    f"{path}: there is no picture in this folder ({', '.join(PICTURES)})"
                    + ("" if below is None else f", but in {below}: name that one, or {path}/*/* in your shell")
                )
            return files
        return [path] if path.suffix.lower() in PICTURES else None
    several = isinstance(inputs, list | tuple) and inputs
    if not several or not all(isinstance(file, str | Path) for file in inputs):
        return None
    files = [Path(file) for file in inputs]
    for file in files:
        if file.suffix.lower() not in PICTURES:
            raise UsageError(f"{file}: several inputs are pictures ({', '.join(PICTURES)}): give others one at a time")
    return files


def _pictures_in(folder: Path) -> list[Path]:
    """Lists a folder's pictures by name, without hidden ones (._NAME.jpg: what macOS adds)."""
    files = (file for file in folder.iterdir() if file.suffix.lower() in PICTURES and not file.name.startswith("."))
    return sorted(files)


def picture_dataset(task: Task, files: Sequence[Path], example: Any) -> Dataset:
    """Returns the pictures as samples of a task, whose data `example` are.

    Raises:
        DataError: the task's data are no pictures.
    """
    if isinstance(example, Images):
        view = example.view
        return _Pictures(files, lambda data: view(data, mix(torch.initial_seed(), 0)))
    if (of_file := _having(example, "of_file")) is not None:
        return _Pictures(files, lambda _: None, of_file)
    arrays = in_memory(example)
    stored = None if arrays is None else arrays.stored(np.arange(1))[0]
    if arrays is None or not isinstance(stored, Tensor) or stored.dtype != torch.uint8 or stored.dim() not in (3, 4):
        raise DataError(
            f"{type(task).__name__}'s data do not define how a picture becomes a sample: they are neither "
            "grappe.data.Images nor Arrays of uint8 [N, C, H, W]. Give your dataset a method of_file(self, file) that "
            "returns the inputs made of a file, or give samples as a .npy file"
        )
    shape, transform = stored.shape[1:], arrays.transform or (lambda batch: batch)
    return _Pictures(files, lambda data: transform(_pixels(data, shape)[None])[0])


class _Pictures(Dataset[tuple[Tensor, int]]):
    """Pairs of a picture's sample and 0: the label is never used."""

    def __init__(self, files: Sequence[Path], decode: Decode, of_file: Callable[[Path], Any] | None = None) -> None:
        self.files, self.decode, self.of_file = files, decode, of_file

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        if not file.is_file():
            raise DataError(f"{file} is not a file")
        if self.of_file is not None:
            return self.of_file(file), 0
        with reading(file), file.open("rb") as stream:
            content = stream.read(LARGEST)
        try:
            return self.decode(content), 0
        except NoPicture as error:
            raise DataError(f"{file}: {printable(error)}") from None


def _pixels(data: bytes, shape: torch.Size) -> Tensor:
    """Decodes a file to uint8 of `shape`, [C, H, W] or [H, W]."""
    from PIL import Image

    channels, (height, width) = (shape[0] if len(shape) == 3 else 1), shape[-2:]
    if channels not in CHANNELS:
        raise NoPicture(f"the task's samples have {channels} channels, and pictures have 1 or 3: give a .npy file")
    header = header_of(data)
    if (header.height, header.width) != (height, width):
        raise NoPicture(
            f"it has {header.width} x {header.height} pixels, and the task's samples {width} x {height}: resize it"
        )
    pixels = Image.fromarray(decoded(data, header)).convert(CHANNELS[channels])
    values = torch.from_numpy(np.array(pixels))
    return values.reshape(shape) if channels == 1 else values.permute(2, 0, 1).contiguous()


def open_lines(file: Path) -> BufferedReader:
    """Opens a file of JSON lines, or the standard input for "-".

    Raises:
        DataError: it is no file, or cannot be read.
    """
    if str(file) == STDIN:
        try:
            return BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False))
        except (AttributeError, ValueError, OSError) as error:  # closed: it is None; in a notebook: no number
            raise DataError("there is no standard input here to read lines from: give a file of them") from error
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is not a file: its lines can come from the standard input, with -")
    with reading(file):
        return BufferedReader(file.open("rb", buffering=0))


def _of_json(line: bytes, place: str, columns: Sequence[str] = ()) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: this is not JSON: {printable(error, 200)}") from None
    return _in_order(value, columns, place) if columns and isinstance(value, dict) else value


def _in_order(row: dict[str, Any], columns: Sequence[str], place: str) -> list[Any]:
    """Returns the values of a row in the order of the columns that the task's data have."""
    if missing := [name for name in columns if name not in row]:
        raise DataError(f"{place}: there is no {missing[0]}, and the task's data have {', '.join(columns)}")
    return [row[name] for name in columns]


def _csv_reader(task: Task, columns: Sequence[str]) -> ReadLine:
    """Returns a reader of a CSV file whose first line names its columns; the task need not read all of them."""
    if not columns:
        raise DataError(
            f"{type(task).__name__}'s data have no names of columns, by which a .csv file is read: give "
            "grappe.Arrays a pandas frame, grappe.Arrays(frame[[…]], frame['…']), or predict a .npy file"
        )
    complain(f"grappe: {', '.join(columns)} are taken as the file has them: data() does not change them here")
    header: list[str] = []

    def read(line: bytes, place: str) -> Any:
        cells = next(csv.reader([line.decode("utf-8-sig", errors="replace")]))
        if not header:
            header.extend(map(str.strip, cells))
            _in_order(dict.fromkeys(header), columns, place)
            return HEADER
        try:
            return [float(cell) for cell in _in_order(dict(zip(header, cells, strict=False)), columns, place)]
        except ValueError as error:
            raise DataError(f"{place}: {printable(error, 200)}: give numbers") from None

    return read


def line_batches(
    stream: BufferedReader, name: str, example: Any, read: ReadLine = _of_json
) -> Iterator[tuple[Any, int]]:
    """Yields inputs of the model, and their number of samples: of the lines that are there, by shape.

    Args:
        example: a batch of the model's inputs, which says types and keys.

    Raises:
        DataError: a line is no sample; with its number.
    """
    number = 0
    for lines in _complete_lines(stream, name):
        waiting: list[list[np.ndarray]] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            place = f"{name}, line {number}"
            if (value := read(line, place)) is HEADER:
                continue
            leaves: list[np.ndarray] = []
            _collect(value, example, place, leaves)
            other = waiting and [leaf.shape for leaf in leaves] != [leaf.shape for leaf in waiting[0]]
            if waiting and (len(waiting) == BATCH or other):
                yield _stacked(waiting, example), len(waiting)
                waiting = []
            waiting.append(leaves)
        if waiting:
            yield _stacked(waiting, example), len(waiting)


def _complete_lines(stream: BufferedReader, name: str) -> Iterator[list[bytes]]:
    """Yields the lines that are there, complete ones only, until the stream ends."""
    rest = bytearray()
    while part := stream.read1(PART):
        complete, newline, begun = part.rpartition(b"\n")
        rest += complete if newline else part
        if len(rest) > LONGEST:
            raise DataError(f"{name}: a line is longer than {LONGEST >> 20} MiB: give one sample a line")
        if newline:
            lines = bytes(rest).split(b"\n")
            rest = bytearray(begun)
            yield lines
    yield [bytes(rest)]


def _collect(value: Any, example: Any, place: str, arrays: list[np.ndarray]) -> None:
    """Appends a sample's arrays, in the order in which `_stacked` takes them."""
    if isinstance(example, Tensor):
        arrays.append(_array(value, example, place))
    elif isinstance(example, dict):
        if not isinstance(value, dict) or set(value) != set(example):
            raise DataError(f"{place}: give an object with {', '.join(map(str, example))}, as the model's inputs have")
        for key, inner in example.items():
            _collect(value[key], inner, f"{place}, {key}", arrays)
    elif isinstance(example, list | tuple):
        if not isinstance(value, list) or len(value) != len(example):
            raise DataError(f"{place}: give a list of {len(example)}, as the model's inputs have")
        for part, inner in zip(value, example, strict=True):
            _collect(part, inner, place, arrays)
    else:
        raise DataError(
            f"the model's inputs hold a {type(example).__name__}, which JSON lines cannot give: predict a split, or "
            "call the model in Python, with model = grappe.load(run)"
        )


def _array(value: Any, example: Tensor, place: str) -> np.ndarray:
    if example.is_complex():
        raise DataError(
            "the model's inputs are complex numbers, which JSON lines cannot give: predict a split, or call the model "
            "in Python, with model = grappe.load(run)"
        )
    try:
        array = np.array(value)
    except ValueError:  # rows of several lengths
        array = np.array(None)
    integers = not example.is_floating_point()
    if integers and array.dtype.kind == "f" and ((np.abs(array) <= EXACT) & (array == np.rint(array))).all():
        array = array.astype(np.int64)  # 1.0
    if array.dtype.kind not in (INTEGERS if integers else f"{INTEGERS}f"):
        what = "whole numbers" if integers else "numbers"
        raise DataError(f"{place}: give {what}, in nested lists of equal length, as the model's inputs are")
    if integers and array.size:
        low, high = 0, 1
        if example.dtype != torch.bool:
            low, high = torch.iinfo(example.dtype).min, torch.iinfo(example.dtype).max
        if int(array.min()) < low or int(array.max()) > high:
            raise DataError(f"{place}: a number is not from {low} to {high}")
    if array.ndim != example.dim() - 1:
        raise DataError(f"{place}: it is {list(array.shape)}, and the model takes {list(example.shape[1:])}")
    return array


def _stacked(samples: list[list[np.ndarray]], example: Any) -> Any:
    columns = iter([np.stack(column) for column in zip(*samples, strict=True)])
    return tree_map(lambda leaf: torch.as_tensor(next(columns)).to(leaf.dtype), example)
