"""Writes predictions to .npy and .npz files, row by row as they come."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from grappe.errors import DataError, UsageError

SUFFIXES = (".npy", ".npz")


def save(file: Path, predictions: Iterable[Any]) -> None:
    """Writes predictions [N, ...]: to a .npy file where each is a tensor, to a .npz file where each is a dict.

    The file appears once all are written; in memory is one row at a time. A name of another ending gets
    .npy, as numpy.save's does; of a link what it leads to is written.

    Raises:
        DataError: there is none.
        UsageError: they are neither, or of several shapes; or `file` is a folder, or in none.
    """
    target = (file if file.suffix in SUFFIXES else Path(f"{file}.npy")).resolve()
    if file.is_dir() or target.is_dir():
        raise UsageError(f"--out {file}: it is a folder: give a file in it, as {file}/predictions.npy")
    if not target.parent.is_dir():
        raise UsageError(f"--out {file}: there is no folder {target.parent}")
    rows = iter(predictions)
    first = next(rows, None)
    if first is None:
        raise DataError(f"--out {file}: there is no sample")
    names = tuple(first) if isinstance(first, dict) else ("",)
    if names != ("",) and file.suffix != ".npz":
        raise UsageError(f"--out {file}: predictions have {', '.join(names)}: give a file that ends in .npz")
    with tempfile.TemporaryDirectory(prefix=".grappe-predict-", dir=target.parent) as folder:
        parts = {name: Path(folder) / f"{number}.npy" for number, name in enumerate(names)}
        with contextlib.ExitStack() as stack:
            columns = {name: _Column(stack.enter_context(part.open("wb"))) for name, part in parts.items()}
            _write(first, columns, file)
            for row in rows:
                _write(row, columns, file)
            for column in columns.values():
                column.finish()
        made = parts[""] if names == ("",) and file.suffix != ".npz" else _zipped(parts, Path(folder))
        made.replace(target)


class _Column:
    """An .npy file that is written by row; its header is written again once the number of rows is known."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._rows = stream, 0
        self._kind: tuple[np.dtype, tuple[int, ...]] | None = None

    def append(self, row: Any) -> None:
        """Writes a row.

        Raises:
            TypeError, ValueError: it is no array of numbers of the first row's type and shape.
        """
        whole = torch.as_tensor(row)
        array = (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()  # NumPy has no bfloat16
        if self._kind is None:
            self._kind = array.dtype, array.shape
            self._header()
        if (array.dtype, array.shape) != self._kind:
            raise ValueError(f"{array.dtype} {list(array.shape)} after {self._kind[0]} {list(self._kind[1])}")
        self._stream.write(array.tobytes())
        self._rows += 1

    def finish(self) -> None:
        """Writes the header with the number of rows."""
        self._stream.seek(0)
        self._header()

    def _header(self) -> None:
        assert self._kind is not None
        kind, shape = self._kind
        # Its length is one for any number of rows: NumPy leaves room for their digits.
        found = {"descr": kind.str, "fortran_order": False, "shape": (self._rows, *shape)}
        np.lib.format.write_array_header_1_0(self._stream, found)


def _write(row: Any, columns: dict[str, _Column], file: Path) -> None:
    try:
        for name, column in columns.items():
            column.append(row[name] if name else row)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(
            f"--out {file}: predictions of several forms or shapes make no array ({error}): leave --out away, and "
            "keep the lines of JSON"
        ) from error


def _zipped(parts: dict[str, Path], folder: Path) -> Path:
    with zipfile.ZipFile(folder / "all.npz", "w") as archive:
        for name, part in parts.items():
            archive.write(part, f"{name or 'output'}.npy")
    return folder / "all.npz"
