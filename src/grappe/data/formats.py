"""Readers of datasets' official files: MNIST's IDX, CIFAR-10's binary and Python versions. No file is executed.

Shapes: N images of a file, or of several together.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grappe.data.pickles import Rebuilt, Refused, values
from grappe.errors import DataError, DataNotFound, reading

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTES = 0x08  # the only one of IDX's types that MNIST and its successors use
_MOST_DIMENSIONS = 4
MOST_SAMPLES = 1_000_000  # more than any of MNIST's successors has: EMNIST, 814,255
_CLASSES = 10
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


def locate(
    names: Sequence[str],
    folder: Path,
    inside: Sequence[str],
    source: str,
    endings: Sequence[str] = ("",),
    task: str = "",
) -> list[Path]:
    """Finds the files `names` in the first of the folders `inside` `folder` that has all of them.

    Args:
        inside: folders below `folder` to look in; "" is `folder` itself.
        source: the files' download address, for the message.
        endings: suffixes that a name may have, in order of preference: ("", ".gz").
        task: the name that `grappe fetch` downloads them by, for the message.

    Raises:
        DataNotFound: no folder has all files; the message is about the folder that has the most.
    """
    absent, where = list(names), folder
    for place in (folder / name for name in inside):
        candidates = [[place / f"{name}{ending}" for ending in endings] for name in names]
        places = [next(filter(os.path.isfile, paths), None) for paths in candidates]
        there = [path for path in places if path is not None]
        if len(there) == len(names):
            return there
        if len(names) - len(there) < len(absent):
            absent = [name for name, path in zip(names, places, strict=True) if path is None]
            where = place
    command = f"grappe fetch {task} --data {shlex.quote(str(folder))}" if task else ""
    raise missing(absent, where, source, command)


def missing(files: Sequence[str], folder: Path, source: str, command: str = "") -> DataNotFound:
    """Returns the error that names the files missing in `folder`, their source, and the folder to put them in.

    Args:
        command: what downloads them.
    """
    there = f"not found in {folder.absolute()}: {', '.join(files)}. "
    if command:
        return DataNotFound(
            f"{there}With internet access (on a login node), run: {command}. Or unpack them there from {source}, or "
            "name their folder with --data"
        )
    return DataNotFound(
        f"{there}They come from {source}. Unpack them there, or name their folder with --data. Compute nodes often "
        "have no internet: fetch them on a login node"
    )


def idx(path: Path, inner: tuple[int, ...] | None = None, most: int = MOST_SAMPLES) -> NDArray[np.uint8]:
    """Reads an IDX file of unsigned bytes, gzipped or not, in the shape that its header gives.

    The format is at the foot of LeCun's MNIST page, https://yann.lecun.com/exdb/mnist/.

    Args:
        inner: the shape of a sample, where it is known: () for labels.
        most: the number of samples that a gzip file may hold. One of 2 MB can hold 2 GB: so the header is looked
            at before more is unpacked.

    Raises:
        DataError: the file cannot be read, is not IDX, or holds less or more than its header says.
    """
    raw = _bytes_of(path)
    if raw[:2].tobytes() == _GZIP:
        stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            out = stream.decompress(raw.data, 4 + 4 * _MOST_DIMENSIONS)
            shape, start = _idx_header(np.frombuffer(out, np.uint8), path, inner)
            if math.prod(shape) > most * math.prod(inner or (1,)):
                raise _damaged(path, f"its header, {_dims(shape)}, asks for more than {most:,} samples")
            left = start + math.prod(shape) - len(out)
            if left >= 0:  # at most one byte more than the header announces
                out += stream.decompress(stream.unconsumed_tail, min(left + 1, sys.maxsize))
        except zlib.error as error:
            raise _damaged(path, f"it cannot be unzipped: {error}") from None
        if stream.eof and stream.unused_data:
            raise _damaged(path, f"{len(stream.unused_data)} trailing bytes after its gzip stream")
        if not stream.eof and len(out) <= start + math.prod(shape):
            raise _damaged(path, f"truncated: its gzip stream stops after {len(out)} bytes, before its end")
        raw = np.frombuffer(bytearray(out), np.uint8)  # torch warns of arrays that it may not write to
    shape, start = _idx_header(raw, path, inner)
    size = start + math.prod(shape)
    if raw.size != size:
        more = "trailing bytes" if raw.size > size else "truncated"
        raise _damaged(path, f"{more}: its header, {_dims(shape)}, asks for {size} bytes, and it has {raw.size}")
    return raw[start:].reshape(shape)


def mnist(images: Path, labels: Path, most: int = MOST_SAMPLES) -> tuple[Images, Labels]:
    """Reads a pair of IDX files of MNIST or Fashion-MNIST: images uint8 [N, 1, 28, 28] and labels int64 [N].

    Raises:
        DataError: for the reasons of `idx`, or the files are not N images of 28 x 28 and N labels of 0 to 9.
    """
    pixels = idx(images, (28, 28), most)
    classes = idx(labels, None, len(pixels))
    if classes.shape != pixels.shape[:1]:
        shape = _dims(classes.shape)
        raise _damaged(labels, f"expected a label for each of {len(pixels)} images, found {shape}")
    return pixels[:, None], _labels(classes, labels)


def cifar10_binary(paths: Sequence[Path]) -> tuple[Images, Labels]:
    """Reads CIFAR-10's binary version (data_batch_1.bin): images uint8 [N, 3, 32, 32] and labels int64 [N].

    Raises:
        DataError: a file cannot be read, or is not whole records of a label and 3,072 pixels.
    """
    images, labels = [], []
    for path in paths:
        raw = _bytes_of(path)
        if raw.size == 0 or raw.size % (1 + _PIXELS):
            raise _damaged(path, f"truncated: {raw.size} bytes are not whole records of {1 + _PIXELS}")
        records = raw.reshape(-1, 1 + _PIXELS)
        labels.append(_labels(records[:, 0], path))
        images.append(records[:, 1:])
    return np.concatenate(images).reshape(-1, 3, _SIDE, _SIDE), np.concatenate(labels)


def cifar10_python(paths: Sequence[Path]) -> tuple[Images, Labels]:
    """Reads CIFAR-10's Python version (data_batch_1): images uint8 [N, 3, 32, 32] and labels int64 [N].

    The files are pickles, which could execute any code: `grappe.data.pickles` says why that cannot happen here.

    Raises:
        DataError: a file cannot be read, is damaged, contains code, or holds anything but such a batch.
    """
    images, labels = [], []
    for path in paths:
        try:
            batch = values(_bytes_of(path).tobytes())
        except Refused as error:
            raise DataError(f"{path} {error}: refused, nothing was run. Fetch it from its official page") from None
        except ValueError as error:
            raise _damaged(path, f"as a pickle: {error}") from None
        if not isinstance(batch, dict) or not {"data", "labels"} <= batch.keys():
            raise _damaged(path, "expected a dictionary with data and labels")
        images.append(_pixels(batch["data"], path))
        rows, stored = len(images[-1]), batch["labels"]
        if not (isinstance(stored, list) and len(stored) == rows and all(type(label) is int for label in stored)):
            raise _damaged(path, f"expected labels to be a list of {rows} whole numbers")
        if not all(0 <= label < _CLASSES for label in stored):  # a large one would not fit into an array
            raise _damaged(path, f"a label is not in 0 to {_CLASSES - 1}")
        labels.append(np.array(stored, np.int64))
    return np.concatenate(images).reshape(-1, 3, _SIDE, _SIDE), np.concatenate(labels)


def _pixels(pixels: object, path: Path) -> NDArray[np.uint8]:
    """Makes the array [N, 3072] from its raw bytes, without calling the functions that the pickle names."""
    match pixels:
        # as numpy's ndarray.__reduce__ and dtype.__reduce__ lay them out
        case Rebuilt(
            "_reconstruct", state=(1, (int(rows), int(columns)), Rebuilt("dtype", arguments=("u1", *_)), order, raw)
        ) if columns == _PIXELS and isinstance(raw, str | bytes):
            try:
                data = raw.encode("latin-1") if isinstance(raw, str) else raw
            except UnicodeEncodeError:
                raise _damaged(path, "its data are not bytes") from None
            if rows < 1 or len(data) != rows * _PIXELS:
                raise _damaged(path, f"truncated: {len(data)} bytes of data are not {rows} x {_PIXELS}")
            flat = np.frombuffer(data, np.uint8)
            return flat.reshape(_PIXELS, rows).T if order else flat.reshape(rows, _PIXELS)
    raise _damaged(path, f"expected data to be a uint8 array [N, {_PIXELS}]")


def _labels(numbers: NDArray[np.uint8], path: Path) -> Labels:
    if numbers.size and numbers.max() >= _CLASSES:
        raise _damaged(path, f"a label is {numbers.max()}, and the last class is {_CLASSES - 1}")
    return numbers.astype(np.int64)


def _idx_header(raw: NDArray[np.uint8], path: Path, inner: tuple[int, ...] | None) -> tuple[tuple[int, ...], int]:
    """Reads the header: the shape, and the offset of the data."""
    zeros, kind, dimensions = (raw[:2].tolist(), *raw[2:4].tolist()) if raw.size >= 4 else ([], 0, 0)
    start = 4 + 4 * dimensions
    if zeros != [0, 0] or kind != _UNSIGNED_BYTES or not 1 <= dimensions <= _MOST_DIMENSIONS:
        magic = raw[:4].tobytes().hex(" ") or "nothing"
        raise _damaged(path, f"not an IDX file of bytes: it should begin with 00 00 08 and 01 to 04, not {magic}")
    if raw.size < start:
        raise _damaged(path, f"truncated in its header: {raw.size} bytes of {start}")
    shape = tuple(raw[4:start].view(">u4").tolist())
    if 0 in shape:
        raise _damaged(path, f"its header, {_dims(shape)}, has a dimension of 0")
    if inner is not None and shape[1:] != inner:
        raise _damaged(path, f"expected images, N x {_dims(inner)}, found {_dims(shape)}")
    return shape, start


def _bytes_of(path: Path) -> NDArray[np.uint8]:
    with reading(path):
        return np.fromfile(path, np.uint8)


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(str(length) for length in shape)


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged or is another file: {why}. Fetch it again, and compare its checksum")
