"""Writes the tar shards of a packed source: each whole, in one rename, with the same bytes each time."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from grappe.data.images.listing import BEGUN, CLASSES, MANIFEST
from grappe.errors import DataError, UsageError
from grappe.launch import files

_LOCK = ".pack.lock"
_BLOCK = 512
_READ = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard that is whole on disk."""

    name: str
    samples: int
    bytes: int
    xxh3: str


def shard_name(number: int) -> str:
    """The name of a shard, by its number from 0."""
    return f"shard-{number:06d}.tar"


@contextmanager
def packing(folder: Path, description: dict[str, Any]) -> Iterator[None]:
    """Context in which this process alone packs into a folder, a new one or one that was begun in the same way.

    Raises:
        UsageError: the folder has something else in it, or another process packs into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(description, indent=1).encode()
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: another process is packing into it") from None
        except OSError:
            pass  # a file system without locks
        _check_begun(folder, text)
        for name in files.names(folder):
            if name.startswith(
                (".shard-", f".{BEGUN}.", f".{MANIFEST}.", f".{CLASSES}.")
            ):  # of a process that was killed
                files.remove(folder / name)
        yield
    files.remove(folder / _LOCK)


def _check_begun(folder: Path, text: bytes) -> None:
    if (folder / BEGUN).is_file():
        if files.read_bytes(folder / BEGUN) != text:
            raise UsageError(
                f"{folder} was begun from another source or with other options (see {BEGUN} in it): name a new folder, "
                "or remove this one"
            )
        return
    there = [name for name in files.names(folder) if name != _LOCK and not name.startswith(f".{BEGUN}.")]
    if there:
        raise UsageError(f"{folder} has something in it, {there[0]} for one: name a new folder")
    files.replace(folder / BEGUN, text, durable=True)


def write_shard(folder: Path, number: int, members: Iterable[tuple[str, bytes]], samples: int) -> Shard:
    """Writes a shard of files by name, in this order.

    Raises:
        OSError: the disk is full, or the quota: nothing is left of it then.
    """
    content = bytearray()
    for name, data in members:
        header = tarfile.TarInfo(name)  # of no time, owner or machine: the same bytes each time
        header.size = len(data)
        content += header.tobuf(tarfile.USTAR_FORMAT)
        content += data
        content += bytes(-len(data) % _BLOCK)
    content += bytes(2 * _BLOCK)
    name = shard_name(number)
    files.replace(folder / name, bytes(content), durable=True)
    return Shard(name=name, samples=samples, bytes=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))


def shard_there(folder: Path, number: int, samples: int) -> Shard | None:
    """A shard that an earlier start has written whole; None where there is none."""
    file = folder / shard_name(number)
    digest, size = xxhash.xxh3_128(), 0
    try:
        with files.reader(file) as stream:
            while content := stream.read(_READ):
                digest.update(content)
                size += len(content)
    except FileNotFoundError:
        return None
    return Shard(name=file.name, samples=samples, bytes=size, xxh3=digest.hexdigest())


def write_manifest(
    folder: Path, classes: Iterable[str], shards: Iterable[Shard], description: dict[str, Any]
) -> None:
    """Writes the classes' names, and last the list of all shards: then the folder is whole.

    Raises:
        DataError: a class has a name of several lines.
    """
    names = list(classes)
    broken = [name for name in names if len(name.splitlines()) != 1]
    if broken:
        raise DataError(f"the class {broken[0]!r} has a name that is no line of text")
    files.replace(folder / CLASSES, "".join(f"{name}\n" for name in names).encode(), durable=True)
    manifest = {"packed": description, "shards": [dataclasses.asdict(shard) for shard in shards]}
    files.replace(folder / MANIFEST, json.dumps(manifest, indent=1).encode(), durable=True)
