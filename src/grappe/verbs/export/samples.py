"""Reads a split's samples as an exported program takes them: before the data's own transform, where it has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.errors import DataError, TaskError
from grappe.launch import files
from grappe.private_api.torch import TreeSpec, tree_flatten
from grappe.task import Task

TYPES = {
    torch.float16: "f2", torch.float32: "f4", torch.float64: "f8", torch.uint8: "u1", torch.int8: "i1",
    torch.int16: "i2", torch.int32: "i4", torch.int64: "i8", torch.bool: "b1",
}  # fmt: skip
"""What .npy files can hold, by NumPy's names."""
EXAMPLE = 3  # samples: torch.export takes 0 and 1 for constants


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSamples:
    """A split's samples, and what becomes of a batch before the model sees it."""

    split: str
    length: int
    transform: Callable[[Any], Any] | None
    """First step of the program: uint8 images to normalised ones, say."""
    spec: TreeSpec
    """Nesting of a batch's tensors."""
    shapes: tuple[torch.Size, ...]
    """Of one sample's tensors."""
    dtypes: tuple[torch.dtype, ...]
    batch: Callable[[np.ndarray], Any]

    def read(self, first: int, last: int) -> list[Tensor]:
        """Reads samples [first, last): the tensors of a batch, each [last - first, ...].

        Raises:
            TaskError: they have another form or shape than the first sample.
        """
        return self.read_ids(np.arange(first, last))

    def read_ids(self, ids: np.ndarray) -> list[Tensor]:
        """Reads the samples `ids` [B]; raises as `read` does."""
        leaves, spec = tree_flatten(self.batch(ids))
        forms = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if spec != self.spec or forms != [
            (tuple(shape), dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]:
            raise TaskError(
                f"the samples from {ids[0]} on have other shapes or types than the first ({forms}): an exported "
                "program takes samples of one shape; pad them in data() or collate() to one length"
            )
        return [leaf.contiguous() for leaf in leaves]

    def example(self) -> list[Tensor]:
        """Reads the batch that the program is traced with."""
        return self.read_ids(np.arange(EXAMPLE) % self.length)


def samples_of(task: Task, split: str, folder: Path) -> ExportSamples:
    """Prepares the samples of a task's split.

    Raises:
        DataError: there is none.
        TaskError: a batch of inputs is no nesting of plain tensors of numbers.
    """
    from grappe.data.arrays import in_memory
    from grappe.data.collate import augments
    from grappe.data.datasets import dataset_of, prepare
    from grappe.verbs.predict.inputs import split_reader

    prepare(task, folder)
    dataset = dataset_of(task, split, folder)
    length = len(dataset)  # pyrefly: ignore
    if not length:
        raise DataError(f"{split}: there is no sample to prove an export with")
    arrays, transform = in_memory(dataset), None
    if arrays is not None and arrays.transform is not None and not augments(task, training=False):
        stored, transform = arrays.stored, arrays.transform

        def batch(ids: np.ndarray) -> Any:
            return stored(ids)[0]
    else:
        batch = split_reader(task, dataset)
    leaves, spec = tree_flatten(batch(np.arange(min(EXAMPLE, length))))
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dtype not in TYPES or not leaf.dim():
            what = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TaskError(
                f"the model's inputs hold {what}: an exported program takes tensors [N, ...] of numbers that .npy "
                f"files have ({', '.join(TYPES.values())})"
            )
    return ExportSamples(
        split=split,
        length=length,
        transform=transform,
        spec=spec,
        shapes=tuple(leaf.shape[1:] for leaf in leaves),
        dtypes=tuple(leaf.dtype for leaf in leaves),
        batch=batch,
    )


def write_npy(folder: Path, names: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """Writes tensors to .npy files; returns the files."""
    arrays = [folder / f"{name}.npy" for name in names]
    for file, tensor in zip(arrays, tensors, strict=True):
        with files.new_file(file) as stream:
            np.save(stream, tensor.numpy(), allow_pickle=False)
    return [str(file) for file in arrays]
