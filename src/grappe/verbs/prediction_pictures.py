"""Reads pictures, JPEG or PNG, as a task's own data make samples of them.

Shapes: pictures of C x H x W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from grappe.data.arrays import in_memory
from grappe.data.draw import mix
from grappe.data.images.dataset import Images
from grappe.data.images.decode import NoPicture, decoded, header_of
from grappe.errors import DataError, UsageError
from grappe.errors.foreign_text import printable
from grappe.task import SPLITS, Task

SUFFIXES = (".jpg", ".jpeg", ".png")
CHANNELS = {1: "L", 3: "RGB"}
LARGEST = 1 << 28  # bytes of a file
Decode = Callable[[bytes], Tensor]


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
            found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
            if not found:
                raise DataError(f"{path}: there is no picture in this folder ({', '.join(SUFFIXES)})")
            return found
        return [path] if path.suffix.lower() in SUFFIXES else None
    if (
        not isinstance(inputs, list | tuple)
        or not inputs
        or not all(isinstance(one, str | Path) for one in inputs)
    ):
        return None
    files = [Path(one) for one in inputs]
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise UsageError(
                f"{file}: several inputs are pictures ({', '.join(SUFFIXES)}): give others one at a time"
            )
    return files


def dataset(task: Task, files: Sequence[Path], example: Any) -> Dataset:
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
            f"{type(task).__name__}'s data say not how a picture becomes a sample: they are neither grappe.data.Images "
            "nor Arrays of uint8 [N, C, H, W]. Give samples as a .npy file"
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
