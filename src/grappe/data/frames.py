"""Makes tensors of what people have data in: NumPy arrays, memory-mapped files, pandas frames and series."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.errors import TaskError


def as_tensor(data: Any) -> Tensor:
    """Returns `data` as a tensor that shares its memory, where that is possible.

    Raises:
        TaskError: it is no numbers: a column of words, dates or missing values, say.
    """
    if hasattr(data, "iloc"):  # pandas, which need not be installed
        data = _of_frame(data)
    try:
        with warnings.catch_warnings():
            # nothing writes to a memory-mapped file that is open for reading: batches are copies
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(data).__name__} of {data.dtype}" if hasattr(data, "dtype") else type(data).__name__
        raise TaskError(
            f"Arrays: {kind} is no array of numbers ({str(error).partition('. ')[0]}): number words, and make decimal "
            "numbers float32, as in astype('float32')"
        ) from error


def _of_frame(data: Any) -> np.ndarray:
    """The values of a frame or series: decimal ones as float32, since a CSV file's float64 is nobody's choice."""
    columns = (
        {str(name): data[name] for name in data.columns}
        if hasattr(data, "columns")
        else {str(data.name): data}
    )
    for name, column in columns.items():
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
