"""Writes and reads tensors in safetensors' format; a file may hold pieces of tensors that are spread over processes.

The format (https://github.com/huggingface/safetensors): 8 bytes, the header's length; the header, JSON; the data.
grappe writes the format itself: the library copies every tensor while it holds the interpreter lock, and training
would wait.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from grappe.checkpoint.commit import Fingerprint, write_all
from grappe.errors import OutOfMemory, RunError
from grappe.errors.causes import is_out_of_memory
from grappe.launch import files
from grappe.launch.files import IN_CHECKPOINT

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
INTEGERS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}
INTEGERS |= {8: (np.int64, torch.int64)}
ALIGNMENT = 8
LARGEST_HEADER = 1 << 25  # bytes, of some 200,000 tensors
WRITE_SIZE = 1 << 20  # bytes: what was just written is still in a cache when it is hashed


class Piece(NamedTuple):
    """A part of a named tensor, or the whole tensor."""

    name: str
    data: Tensor
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    offset: tuple[int, ...]
    """The part's first index in the whole tensor, by dimension."""
    bits: int | None = None
    """A number made of all bits, which a copy of it has as well; None: copies are not compared."""

    @classmethod
    def complete(cls, name: str, tensor: Tensor) -> Piece:
        """Returns a tensor that is not spread over processes."""
        shape = tuple(tensor.shape)
        return cls(name, tensor.detach(), shape, (0,) * len(shape))


def write(file: Path, pieces: Sequence[Piece], values: Iterable[Tensor] | None = None) -> Fingerprint:
    """Writes tensors to a new file and flushes it to disk; returns its fingerprint.

    Args:
        values: the pieces' values, in their order, when `pieces` has shapes only; read one after the other.
    """
    header, digest, size = _header(pieces), xxhash.xxh3_128(), 0
    tensors = (piece.data for piece in pieces) if values is None else _fitting(pieces, values)
    with files.new_file(file, IN_CHECKPOINT) as stream:
        for chunk in itertools.chain([header], (part for tensor in tensors for part in _bytes(tensor))):
            size += write_all(stream.fileno(), chunk)
            digest.update(chunk)
        os.fsync(stream.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _fitting(pieces: Sequence[Piece], values: Iterable[Tensor]) -> Iterator[Tensor]:
    for piece, value in zip(pieces, values, strict=True):
        assert (value.shape, value.dtype) == (piece.data.shape, piece.data.dtype), piece.name
        yield value.detach().cpu()


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, Any] = {}
    parts, position = {}, 0
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
    data = data.contiguous().view(-1) if data.numel() else data.new_empty(0)  # an empty one may have any strides
    view = memoryview(data.view(torch.uint8).numpy())  # pyrefly: ignore
    for start in range(0, len(view), WRITE_SIZE):
        yield view[start : start + WRITE_SIZE]


class _Mapped:
    """A file's tensors, mapped into memory for reading only.

    The library maps them so that they could be written: under RLIMIT_DATA a checkpoint counts as data then.
    """

    def __init__(self, file: Path, levels: int) -> None:
        self.file = file
        with files.reader(file, levels) as stream:
            if int.from_bytes(stream.read(8), "little") > LARGEST_HEADER:
                raise RunError(f"{file} is not a readable safetensors file: its header is too long")
            # The library opens by name: this name means the file that is open here, even if it was replaced since.
            with safe_open(f"/dev/fd/{stream.fileno()}", framework="np") as checked:  # checks the header
                self.names = list(checked.keys())
                self.metadata = checked.metadata() or {}
            content = np.asarray(np.memmap(stream, np.uint8, "r"))
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        self._entries = json.loads(content[8:start].tobytes())
        self._data = content[start:]
        for name in self.names:
            if (dtype := self._entries[name]["dtype"]) not in DTYPES:
                raise RunError(f"{file}: {name!r} is {dtype}, which torch has no type for")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name]["dtype"]]

    def integers(self, name: str) -> np.ndarray:
        """Returns a tensor's bits as read-only integers of the same size, since numpy lacks some of torch's types."""
        start, stop = self._entries[name]["data_offsets"]
        kind = INTEGERS[self.dtype(name).itemsize][0]
        return self._data[start:stop].view(kind).reshape(self.shape(name))


class TensorFiles:
    """The tensors of several files, assembled from their pieces when they are read.

    Args:
        levels: how many of the last names of each file's path may not be links (see grappe.launch.files).

    Raises:
        OutOfMemory: the process may not map a file into its address space.
        RunError: a file is no safetensors file, or its pieces do not fit together.
    """

    def __init__(self, files: Sequence[Path], levels: int = IN_CHECKPOINT) -> None:
        self.has_pieces = False
        """Whether a file is one of grappe's own, which may hold pieces of tensors."""
        self._places: dict[str, list[tuple[_Mapped, tuple[int, ...]]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                self._add(file, levels)
            except RunError:
                raise
            except Exception as error:  # the library has an error class of its own
                if is_out_of_memory(error):
                    raise OutOfMemory(
                        f"no memory was left to read {file}: {error}. Give the process more (the job's --mem, "
                        "`ulimit -v`)"
                    ) from error
                raise RunError(f"{file} is not a readable safetensors file: {error}") from error

    def _add(self, file: Path, levels: int) -> None:
        mapped = _Mapped(file, levels)
        self.has_pieces |= "pieces" in mapped.metadata
        parts = json.loads(mapped.metadata.get("pieces", "{}"))
        for name in mapped.names:
            local = mapped.shape(name)
            part = parts.get(name) or {"shape": local, "offset": [0] * len(local)}
            shape, offset = tuple(map(int, part["shape"])), tuple(map(int, part["offset"]))
            fits = len(local) == len(offset) == len(shape) and all(
                begin >= 0 and begin + size <= full for size, begin, full in zip(local, offset, shape, strict=True)
            )
            if self._shapes.setdefault(name, shape) != shape or not fits:
                raise RunError(f"{file}: the pieces of {name!r} do not fit together")
            places = self._places.setdefault(name, [])
            if any(offset == other for _, other in places):
                raise RunError(f"{file}: a piece of {name!r} is there twice")
            places.append((mapped, offset))

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's type, from its file's header."""
        return self._places[name][0][0].dtype(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        shape, places = self._shapes[name], self._places[name]
        if len(places) == 1 and not math.prod(shape):  # an empty tensor has no parts
            return torch.empty(shape, dtype=places[0][0].dtype(name))
        return self.read_part(name, shape, (0,) * len(shape))

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """Reads the part of a tensor that begins at `offset` and has `shape`, and no more bytes than needed.

        Raises:
            RunError: the files' pieces do not cover the part.
        """
        boxes = []
        for mapped, at in self._places[name]:
            box = [  # that both share, as (start, stop) by dimension
                (max(p, q), min(p + m, q + n)) for p, m, q, n in zip(offset, shape, at, mapped.shape(name), strict=True)
            ]
            if all(start < stop for start, stop in box):
                boxes.append((mapped, at, box))
        covered = sum(math.prod(stop - start for start, stop in box) for _, _, box in boxes)
        if not boxes or covered != math.prod(shape):  # before memory is allocated: the shape may be false
            folder = self._places[name][0][0].file.parent
            raise RunError(f"{folder}: {name!r} is not there in full: a file of the checkpoint is missing")
        if len(boxes) > 1:  # of the right size together, two that overlap would leave a gap
            start, stop = np.array([box for *_, box in boxes]).transpose(2, 0, 1)
            if (((start[:, None] < stop) & (start < stop[:, None])).all(-1)).sum() > len(boxes):
                places = " and ".join(sorted({str(mapped.file) for mapped, *_ in boxes}))
                raise RunError(f"{places}: the pieces of {name!r} overlap: they are not of one checkpoint")
        result = torch.empty(tuple(shape), dtype=boxes[0][0].dtype(name))
        writable = result.view(INTEGERS[result.element_size()][1]).numpy()  # in the type of _Mapped.integers
        for mapped, at, box in boxes:
            if mapped.dtype(name) != result.dtype:
                raise RunError(f"the pieces of {name!r} are {result.dtype} and {mapped.dtype(name)}")
            writable[_within(box, offset)] = mapped.integers(name)[_within(box, at)]
        return result


def _within(box: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """Returns a box as slices relative to `offset`."""
    return tuple(slice(start - begin, stop - begin) for (start, stop), begin in zip(box, offset, strict=True))
