"""Holds a dataset in memory and gathers whole batches instead of single samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from grappe.data.device_copy import Constant, copies_to, is_dense, sent
from grappe.errors import TaskError
from grappe.errors.user_code import calls_users
from grappe.private_api.torch import tree_flatten, tree_map

CPU = torch.device("cpu")
DEVICE_SHARE = 0.25  # of a GPU's free memory that a dataset may take, so that gathers need no transfer


class Arrays(Dataset):
    """Samples held as whole arrays, each with the samples along its first dimension.

    Args:
        inputs: array or tensor [N, ...], or any nesting of them; small types (uint8) stay small. NumPy's memory-mapped
            files, np.load(file, mmap_mode="r"), stay on the disk. Of a pandas frame all columns, [N, columns], as
            float32 where one is decimal; of a series [N].
        targets: in the same form, of the same N.
        transform: maps a gathered batch of inputs to the model's inputs (such as normalisation); runs on the
            device, on [B, ...], and must treat each row by itself.

    Raises:
        TaskError: the arrays' lengths differ, or one does not hold numbers.
    """

    def __init__(self, inputs: Any, targets: Any, *, transform: Callable[[Any], Any] | None = None) -> None:
        self.inputs, self.targets = (tree_map(as_tensor, _of_rows(data)) for data in (inputs, targets))
        self.columns = tuple(map(str, getattr(inputs, "columns", ())))
        """Names of the columns of a pandas frame of inputs; (): they have none."""
        self._rows: Tensor | None = None
        self._has_copies = False
        self._on_gpu: torch.device | None = None
        self.transform = transform
        lengths = {len(leaf) for leaf in tree_flatten((self.inputs, self.targets))[0]}
        if len(lengths) != 1:
            parts = {len(data) for data in (self.inputs, self.targets) if isinstance(data, list)}
            why = " (a list of arrays is several inputs: np.stack makes one array of it)" if parts & lengths else ""
            raise TaskError(f"Arrays: inputs and targets have different lengths: {sorted(lengths)}{why}")
        self._length = lengths.pop()
        self._plain = isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, targets = self.gather(np.array([index]))
        return tree_map(lambda leaf: leaf[0], (inputs, targets))

    def rows(self, ids: np.ndarray) -> Arrays:
        """Returns the samples `ids` [n] as Arrays that share these arrays' memory."""
        chosen = copy.copy(self)
        index = torch.from_numpy(ids)
        chosen._rows = index if self._rows is None else self._rows[index]
        chosen._length = len(ids)
        return chosen

    def with_copies(self) -> Arrays:
        """Returns the same samples repeated: number i + c N is copy c of sample i of N."""
        repeated = copy.copy(self)
        repeated._has_copies = True
        return repeated

    @calls_users("a sample of data()")
    def gather(self, ids: np.ndarray, device: torch.device | None = None) -> tuple[Any, Any]:
        """Returns the samples `ids` [B] as a transformed batch on `device`."""
        inputs, targets = self.stored(ids, device)
        return (self.transform(inputs) if self.transform else inputs), targets

    def stored(self, ids: np.ndarray, device: torch.device | None = None) -> tuple[Any, Any]:
        """Returns the samples `ids` [B] as they are stored, without the transform."""
        index = torch.from_numpy(ids % self._length if self._has_copies else ids)
        if self._rows is not None:
            index = self._rows[index]
        if self._plain and device == CPU:
            return self.inputs.index_select(0, index), self.targets.index_select(0, index)
        if self._on_gpu is not None:
            index = sent(index, self._on_gpu)
        rows = _picked(self.inputs, index, device), _picked(self.targets, index, device)
        if device is None or device.type != "cuda" or device == self._on_gpu:
            return rows
        return copies_to(device)(rows)

    def to_device(self, device: torch.device) -> None:
        """Moves the samples to a GPU if they take at most a quarter of the GPU's free memory."""
        if device.type != "cuda" or self._on_gpu is not None:
            return
        leaves = tree_flatten((self.inputs, self.targets))[0]
        stored, rows = len(leaves[0]), self._rows
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        if rows is not None:
            size = size * len(rows) // stored
        if size < DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
            both = (self.inputs, self.targets)
            if rows is not None:  # where several splits share arrays, each split moves its own rows
                both = tree_map(lambda leaf: leaf.index_select(0, rows.to(leaf.device)), both)
            self.inputs, self.targets = tree_map(lambda leaf: leaf.to(device), both)
            self._on_gpu, self._plain, self._rows = device, False, None


def in_memory(dataset: Dataset) -> Arrays | None:
    """Returns the dataset as Arrays if its samples are in memory already; else None."""
    if isinstance(dataset, Arrays):
        return dataset
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return Arrays(*dataset.tensors)
    return None


def one_by_one(dataset: Any) -> Any:
    """Returns a dataset that `in_memory` leaves alone: a task's own collate gets samples, not whole batches."""
    return dataset if in_memory(dataset) is None else RepeatedDataset(dataset)


class RepeatedDataset(Dataset):
    """A dataset of N samples, read one by one, in which i + c N is copy c of sample i."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def with_copies(dataset: Any) -> Any:
    """Returns the dataset, in memory where it was, with i + c N for copy c of sample i of N."""
    arrays = in_memory(dataset)
    return RepeatedDataset(dataset) if arrays is None else arrays.with_copies()


def normalise(mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    """Returns a `transform` for images: uint8 [B, C, H, W] to float32, (x / 255 - mean) / std per channel."""
    shift = Constant(torch.tensor(mean).view(-1, 1, 1) * 255)
    scale = Constant(1 / (torch.tensor(std).view(-1, 1, 1) * 255))

    def transform(images: Tensor) -> Tensor:
        return images.float().sub_(shift.on(images.device)).mul_(scale.on(images.device))

    return transform


def _picked(stored: Any, index: Tensor, device: torch.device | None) -> Any:
    """Returns rows of all tensors of a nesting; torch's tree_map takes 15 microseconds for a dictionary of one."""
    if isinstance(stored, Tensor):
        return _pick(stored, index, device)
    if type(stored) is dict:
        return {name: _picked(tensor, index, device) for name, tensor in stored.items()}
    return tree_map(lambda leaf: _pick(leaf, index, device), stored)


def _pick(stored: Tensor, index: Tensor, device: torch.device | None) -> Tensor:
    """Returns rows on `device`; for a GPU, rows of the host are first gathered into page-locked memory."""
    if device is not None and device.type == "cuda" and is_dense(stored) and stored.is_cpu:
        rows = torch.empty((len(index), *stored.shape[1:]), dtype=stored.dtype, pin_memory=True)
        return torch.index_select(stored, 0, index, out=rows)
    rows = stored.index_select(0, index if index.device == stored.device else sent(index, stored.device))
    return rows if device is None or device.type == "cuda" or rows.device == device else rows.to(device)


def _of_rows(data: Any) -> Any:
    """Returns a list of rows, or of numbers, as one array; a list of arrays is of several inputs."""
    leaf = data
    while isinstance(leaf, list | tuple) and leaf:
        leaf = leaf[0]
    return np.asarray(data) if isinstance(data, list) and isinstance(leaf, int | float) else data


def native(data: Any) -> Any:
    """Returns an array of NumPy's as torch takes it, copied where it has to be; anything else as it is.

    Raises:
        TaskError: values are masked.
    """
    if not isinstance(data, np.ndarray):
        return data
    if np.ma.is_masked(data):
        raise TaskError("a masked array has values that are missing: fill them, as in array.filled(0)")
    data = data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("="))
    return np.ascontiguousarray(data) if min(data.strides, default=0) < 0 else data


def as_tensor(data: Any) -> Tensor:
    """Returns `data` as a tensor that shares its memory, where that is possible; else a copy.

    Raises:
        TaskError: it does not hold numbers (but words, dates or missing values, for example).
    """
    if hasattr(data, "iloc"):  # pandas, which need not be installed
        data = _of_frame(data)
    data = native(data)
    try:
        with warnings.catch_warnings():
            # nothing writes to a memory-mapped file that is open for reading: batches are copies
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(data).__name__} of {data.dtype}" if hasattr(data, "dtype") else type(data).__name__
        raise TaskError(
            f"Arrays: {kind} is not an array of numbers ({str(error).partition('. ')[0]}): encode words as numbers, "
            "and make decimal numbers float32, as in astype('float32')"
        ) from error


def _of_frame(data: Any) -> np.ndarray:
    """The values of a frame or series: decimal ones as float32, since nobody chose a CSV file's float64."""
    is_frame = hasattr(data, "columns")
    columns = {name: data[name] for name in data.columns} if is_frame else {data.name: data}
    for name, column in ((str(name), column) for name, column in columns.items()):
        missing = int(column.isna().sum())
        if missing:
            raise TaskError(
                f"Arrays: column {name!r} has {missing} missing values, which would make the loss nan: fillna() or "
                "dropna()"
            )
        if getattr(column.dtype, "kind", "O") not in "biuf":
            raise TaskError(
                f"Arrays: column {name!r} holds no numbers but {column.dtype}: leave it out, or number its values: "
                f"frame[{name!r}].astype('category').cat.codes"
            )
    values = data.to_numpy()
    if values.dtype == object:  # columns of pandas' own types
        values = data.to_numpy(dtype="float64")
    return values.astype(np.float32) if values.dtype.kind == "f" else values
