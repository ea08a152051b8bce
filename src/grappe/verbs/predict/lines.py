"""Reads samples from JSON lines, as they come: what has been read is predicted before the next is waited for."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from grappe.errors import DataError
from grappe.errors.foreign_text import printable
from grappe.private_api.torch import tree_map

STDIN = "-"
SUFFIXES = (".jsonl", ".ndjson")
BATCH = 256
PART = 1 << 20  # bytes that are read at a time
LONGEST = 1 << 26  # bytes of a line
EXACT = 1 << 53  # up to which a float tells whole numbers apart
INTEGERS = "biu"  # NumPy's kinds of whole numbers


class ByteStream(Protocol):
    """A stream of bytes."""

    def read1(self, size: int, /) -> bytes: ...


def opened(file: Path) -> ByteStream:
    """Opens a file of JSON lines, or the standard input for "-".

    Raises:
        DataError: it is no file, or cannot be read.
    """
    if str(file) == STDIN:
        try:
            return BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False))
        except (AttributeError, ValueError, OSError) as error:  # closed: it is None; in a notebook: no number
            raise DataError(
                "there is no standard input here to read lines from: give a file of them"
            ) from error
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is no file: its lines can come from the standard input, with -")
    try:
        return BufferedReader(file.open("rb", buffering=0))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def batches(stream: ByteStream, name: str, example: Any) -> Iterator[tuple[Any, int]]:
    """Yields inputs of the model, and their number of samples: of the lines that are there, by shape.

    Args:
        example: a batch of the model's inputs, which says types and keys.

    Raises:
        DataError: a line is no sample; with its number.
    """
    number = 0
    for lines in _parts(stream, name):
        waiting: list[list[np.ndarray]] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            leaves = _sample(line, example, f"{name}, line {number}")
            if waiting and (len(waiting) == BATCH or _shapes(leaves) != _shapes(waiting[0])):
                yield _stacked(waiting, example), len(waiting)
                waiting = []
            waiting.append(leaves)
        if waiting:
            yield _stacked(waiting, example), len(waiting)


def _parts(stream: ByteStream, name: str) -> Iterator[list[bytes]]:
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


def _sample(line: bytes, example: Any, place: str) -> list[np.ndarray]:
    """Returns a sample's arrays, in the order in which `_stacked` wants them."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: it is no JSON: {printable(error, 200)}") from None
    arrays: list[np.ndarray] = []
    _collect(value, example, place, arrays)
    return arrays


def _collect(value: Any, example: Any, place: str, arrays: list[np.ndarray]) -> None:
    if isinstance(example, Tensor):
        arrays.append(_array(value, example, place))
    elif isinstance(example, dict):
        if not isinstance(value, dict) or set(value) != set(example):
            raise DataError(
                f"{place}: give an object with {', '.join(map(str, example))}, as the model's inputs have"
            )
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
    if integers and array.dtype.kind == "f" and _is_whole(array):
        array = array.astype(np.int64)  # 1.0
    if array.dtype.kind not in (INTEGERS if integers else f"{INTEGERS}f"):
        what = "whole numbers" if integers else "numbers"
        raise DataError(f"{place}: give {what}, in nested lists of one length, as the model's inputs are")
    if integers and array.size:
        bounds = (
            (0, 1)
            if example.dtype == torch.bool
            else (torch.iinfo(example.dtype).min, torch.iinfo(example.dtype).max)
        )
        if int(array.min()) < bounds[0] or int(array.max()) > bounds[1]:
            raise DataError(f"{place}: a number is not from {bounds[0]} to {bounds[1]}")
    if array.ndim != example.dim() - 1:
        raise DataError(f"{place}: it is {list(array.shape)}, and the model takes {list(example.shape[1:])}")
    return array


def _is_whole(array: np.ndarray) -> bool:
    return bool((np.abs(array) <= EXACT).all() and (array == np.rint(array)).all())


def _shapes(leaves: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in leaves]


def _stacked(samples: list[list[np.ndarray]], example: Any) -> Any:
    columns = iter([np.stack(column) for column in zip(*samples, strict=True)])
    return tree_map(lambda leaf: torch.as_tensor(next(columns)).to(leaf.dtype), example)
