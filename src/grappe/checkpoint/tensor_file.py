"""Writes and reads tensors in safetensors' format; a file may hold pieces of tensors that are spread over processes.

The format (https://github.com/huggingface/safetensors): 8 bytes, the header's length; the header, JSON; the data.
We write it ourselves, since the library copies every tensor while holding the interpreter, and training would wait.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from grappe.checkpoint.commit import Fingerprint
from grappe.errors import RunError

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ALIGNMENT = 8
WRITE_SIZE = 1 << 20  # bytes: what was just written is still in a cache when it is hashed


class Piece(NamedTuple):
    """A part of a named tensor, or all of it."""

    name: str
    data: Tensor
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    offset: tuple[int, ...]
    """Where the part begins in the whole."""


def write(file: Path, pieces: Sequence[Piece], values: Iterable[Tensor] | None = None) -> Fingerprint:
    """Writes tensors to a new file and flushes it to disk; its fingerprint.

    Args:
        values: the pieces' numbers, in their order, where `pieces` has shapes only; asked for one after the other.
    """
    header = _header(pieces)
    digest = xxhash.xxh3_128()
    size = 0
    tensors = (piece.data for piece in pieces) if values is None else _fitting(pieces, values)
    with file.open("xb", buffering=0) as stream:
        for chunk in itertools.chain([header], (part for one in tensors for part in _bytes(one))):
            size += _write_all(stream.fileno(), chunk)
            digest.update(chunk)
        os.fsync(stream.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _fitting(pieces: Sequence[Piece], values: Iterable[Tensor]) -> Iterator[Tensor]:
    for piece, value in zip(pieces, values, strict=True):
        assert (value.shape, value.dtype) == (piece.data.shape, piece.data.dtype), piece.name
        yield value.detach().cpu()


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, Any] = {}
    parts = {}
    position = 0
    for piece in pieces:
        if piece.data.dtype not in NAMES:
            raise RunError(f"{piece.name!r} is {piece.data.dtype}, which safetensors cannot hold")
        size = piece.data.numel() * piece.data.element_size()
        entries[piece.name] = {
            "dtype": NAMES[piece.data.dtype],
            "shape": list(piece.data.shape),
            "data_offsets": [position, position + size],
        }
        position += size
        if piece.shape != tuple(piece.data.shape):
            parts[piece.name] = {"shape": piece.shape, "offset": piece.offset}
    entries["__metadata__"] = {"format": "pt", "pieces": json.dumps(parts)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(data: Tensor) -> Iterator[memoryview]:
    flat = (
        data.contiguous().view(-1).view(torch.uint8) if data.numel() else data.new_empty(0, dtype=torch.uint8)
    )
    view = memoryview(flat.numpy())  # pyrefly: ignore
    for start in range(0, len(view), WRITE_SIZE):
        yield view[start : start + WRITE_SIZE]


def _write_all(handle: int, chunk: bytes | memoryview) -> int:
    view, done = memoryview(chunk), 0
    while done < len(view):
        done += os.write(handle, view[done:])
    return done


class TensorFiles:
    """The tensors of several files, put together from their pieces when they are read.

    Raises:
        RunError: a file is no safetensors file, or its pieces do not fit together.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._places: dict[str, list[tuple[Any, tuple[int, ...]]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                self._add(file)
            except RunError:
                raise
            except (
                Exception
            ) as error:  # the library has an error class of its own, beside OSError and ValueError
                raise RunError(f"{file} is no readable safetensors file: {error}") from error

    def _add(self, file: Path) -> None:
        handle = safe_open(file, framework="pt")
        parts = json.loads((handle.metadata() or {}).get("pieces", "{}"))
        for name in handle.keys():  # noqa: SIM118
            local = tuple(handle.get_slice(name).get_shape())
            part = parts.get(name) or {"shape": local, "offset": [0] * len(local)}
            shape, offset = tuple(map(int, part["shape"])), tuple(map(int, part["offset"]))
            if self._shapes.setdefault(name, shape) != shape or not _fits(local, offset, shape):
                raise RunError(f"{file}: the pieces of {name!r} do not fit together")
            places = self._places.setdefault(name, [])
            if any(offset == other for _, other in places):
                raise RunError(f"{file}: a piece of {name!r} is there twice")
            places.append((handle, offset))

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        places = self._places[name]
        if len(places) == 1 and tuple(places[0][0].get_slice(name).get_shape()) == self._shapes[name]:
            return places[0][0].get_tensor(name)
        return self.read_part(name, self._shapes[name], (0,) * len(self._shapes[name]))

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """The part of a tensor that begins at `offset` and has `shape`, reading no more than it needs.

        Raises:
            RunError: the pieces there are do not cover it.
        """
        boxes = []
        for handle, at in self._places[name]:
            box = _overlap(offset, shape, at, handle.get_slice(name).get_shape())
            if box is not None:
                boxes.append((handle, at, box))
        covered = sum(math.prod(stop - start for start, stop in box) for _, _, box in boxes)
        if not boxes or covered != math.prod(shape):  # before memory is asked for: the shape may be a lie
            raise RunError(f"{name!r} is not there in full: a file of the checkpoint is missing")
        result: Tensor | None = None
        for handle, at, box in boxes:
            there = _within(box, at)
            values = handle.get_slice(name)[there] if there else handle.get_tensor(name)
            result = values.new_empty(tuple(shape)) if result is None else result
            result[_within(box, offset)] = values
        assert result is not None
        return result


def _within(box: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """A box as slices of what begins at `offset`."""
    return tuple(slice(start - begin, stop - begin) for (start, stop), begin in zip(box, offset, strict=True))


def _fits(local: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> bool:
    return len(local) == len(offset) == len(shape) and all(
        begin >= 0 and begin + size <= whole for size, begin, whole in zip(local, offset, shape, strict=True)
    )


def _overlap(
    a: Sequence[int], a_shape: Sequence[int], b: Sequence[int], b_shape: Sequence[int]
) -> list[tuple[int, int]] | None:
    """The box that two boxes share, as (start, stop) by dimension; None where they share nothing."""
    box = [(max(p, q), min(p + m, q + n)) for p, m, q, n in zip(a, a_shape, b, b_shape, strict=True)]
    return None if any(start >= stop for start, stop in box) else box
