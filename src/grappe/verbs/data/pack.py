"""Packs a source of images into tar shards of smaller JPEG files: resumable, and with the same bytes each time."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from grappe.data.images.dataset import Images
from grappe.data.images.decode import CentreCrop, NoPicture, decoded, header_of, shortened
from grappe.data.images.listing import BEGUN, CLASSES, MANIFEST
from grappe.errors import DataError, UsageError
from grappe.launch import files
from grappe.verbs.data.walk import ProgressMeter, in_threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Form of the packed images."""

    short: int = 256
    """Pixels of the short side; smaller pictures stay as they are."""
    quality: int = 90
    """Quality of the JPEG files, 1 to 100."""
    per_shard: int = 4096
    """Images in each shard."""

    def __post_init__(self) -> None:
        for name, value, most in (("short", self.short, 4096), ("quality", self.quality, 100)):
            if not 1 <= value <= most:
                raise UsageError(f"--{name} {value}: it must be 1 to {most}")
        if not 1 <= self.per_shard <= 1_000_000:
            raise UsageError(f"--per-shard {self.per_shard}: it must be 1 to 1,000,000")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedImages:
    """Result of packing."""

    folder: Path
    shards: tuple[Shard, ...]
    images: int
    source_bytes: int
    were_there: int
    """Shards that an earlier start had written."""

    @property
    def bytes(self) -> int:
        """The size of all shards together."""
        return sum(shard.bytes for shard in self.shards)


def pack(
    source: Path,
    to: Path,
    form: Packing,
    *,
    labels: Path | None = None,
    numbering: Path | None = None,
    dry_run: bool = False,
) -> PackedImages:
    """Packs a source into a folder of shards; samples keep their ids, so that orders and resumed runs are the same.

    If it is killed, the next start goes on from there: a shard exists complete, or not at all. With `dry_run`
    only the source's index is made; the result has the shards that are there.

    Raises:
        DataError: an image cannot be decoded, or the disk is full.
        UsageError: the folder has something else in it.
    """
    source, to = source.absolute(), to.absolute()
    if to == source or to.is_relative_to(source):
        raise UsageError(f"--out {to}: this is in the source, which stays as it is")
    data = Images(source, CentreCrop(), labels=labels, numbering=numbering)
    # What is packed and how: a folder that was begun with other settings is left alone.
    names = xxhash.xxh3_64()
    for content in data.identity():
        names.update(content)
    description = {**dataclasses.asdict(form), "source": source.name, "images": len(data), "names": names.hexdigest()}
    starts = range(0, len(data), form.per_shard)
    sizes = [min(form.per_shard, len(data) - first) for first in starts]
    if dry_run:
        _is_begun(to, description)
        there = [shard for number, size in enumerate(sizes) if (shard := shard_there(to, number, size)) is not None]
        return PackedImages(
            folder=to, shards=tuple(there), images=len(data), source_bytes=data.total_bytes(), were_there=len(there)
        )
    label_of = data.targets()
    meter = ProgressMeter("packing", len(data))

    def made(index: int) -> bytes:
        try:
            return smaller(data.read(index), form)
        except NoPicture as error:
            raise DataError(
                f"{source}: {data.name(index)}: {error}. Find all such files, and leave them out: "
                f"grappe data check {source}"
            ) from None

    def members(ids: range) -> Iterator[tuple[str, bytes]]:
        for index, content in zip(ids, in_threads(made, ids), strict=True):
            yield f"{index:08d}.cls", b"%d" % label_of[index]
            yield f"{index:08d}.jpg", content
            meter.at(index + 1)

    written, there = [], 0
    with packing(to, description):
        for number, (first, size) in enumerate(zip(starts, sizes, strict=True)):
            ids = range(first, first + size)
            shard = shard_there(to, number, len(ids))
            there += shard is not None
            if shard is None:
                try:
                    shard = write_shard(to, number, members(ids), len(ids))
                except OSError as error:
                    raise DataError(
                        f"{to / shard_name(number)} cannot be written: {error.strerror or error}. {number} shards are "
                        "complete and stay: make room, and start the same command again"
                    ) from None
            written.append(shard)
            meter.at(ids.stop)
        meter.end()
        write_manifest(to, data.classes, written, description)
    return PackedImages(
        folder=to, shards=tuple(written), images=len(data), source_bytes=data.total_bytes(), were_there=there
    )


def smaller(data: bytes, form: Packing) -> bytes:
    """An image's file with its short side at `form.short`; one that is small enough already stays as it is.

    Raises:
        NoPicture: it cannot be decoded.
    """
    from PIL import Image

    header = header_of(data)
    if header.kind == "jpeg" and header.channels != 4 and min(header.height, header.width) <= form.short:
        decoded(data, header)
        return data
    short = min(form.short, header.height, header.width)
    pixels = shortened(data, short).permute(1, 2, 0).contiguous().numpy()
    stream = io.BytesIO()
    # Pillow, and no other library: encoders need not agree in every bit
    Image.fromarray(pixels).save(stream, "JPEG", quality=form.quality, subsampling="4:2:0", optimize=False)
    return stream.getvalue()


_LOCK = ".pack.lock"
_BLOCK = 512


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
    with (folder / _LOCK).open("w") as lock:
        if not files.take_lock(lock):
            raise UsageError(f"{folder}: another process is packing into it")
        if not _is_begun(folder, description):
            files.replace(folder / BEGUN, _text(description), durable=True)
        for name in files.names(folder):  # of a process that was killed
            if name.startswith((".shard-", f".{BEGUN}.", f".{MANIFEST}.", f".{CLASSES}.")):
                files.remove(folder / name)
        yield
    files.remove(folder / _LOCK)


def _is_begun(folder: Path, description: dict[str, Any]) -> bool:
    """Returns whether a folder of shards was begun in this way; raises UsageError where it has something else in it."""
    if (folder / BEGUN).is_file():
        if files.read_bytes(folder / BEGUN) != _text(description):
            raise UsageError(
                f"{folder} was begun from another source or with other options (see {BEGUN} in it): name a new "
                "folder, or remove this one"
            )
        return True
    names = files.names(folder) if folder.exists() else []
    there = [name for name in names if name != _LOCK and not name.startswith(f".{BEGUN}.")]
    if there:
        raise UsageError(f"{folder} has something in it, {there[0]} for one: name a new folder")
    return False


def _text(description: dict[str, Any]) -> bytes:
    return json.dumps(description, indent=1).encode()


def write_shard(folder: Path, number: int, members: Iterable[tuple[str, bytes]], samples: int) -> Shard:
    """Writes a shard of files by name, in this order.

    Raises:
        OSError: the disk is full, or the quota: nothing is left of it then.
    """
    content = bytearray()
    for name, data in members:
        header = tarfile.TarInfo(name)  # without time, owner and machine: the same bytes each time
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
    name = shard_name(number)
    try:
        with files.reader(folder / name) as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            return Shard(name=name, samples=samples, bytes=stream.tell(), xxh3=digest)
    except FileNotFoundError:
        return None


def write_manifest(folder: Path, classes: Iterable[str], shards: Iterable[Shard], description: dict[str, Any]) -> None:
    """Writes the classes' names, and last the list of all shards: then the folder is whole.

    Raises:
        DataError: a class has a name of several lines.
    """
    names = list(classes)
    broken = [name for name in names if len(name.splitlines()) != 1]
    if broken:
        raise DataError(f"the class {broken[0]!r} has a name that is not one line of text")
    files.replace(folder / CLASSES, "".join(f"{name}\n" for name in names).encode(), durable=True)
    manifest = {"packed": description, "shards": [dataclasses.asdict(shard) for shard in shards]}
    files.replace(folder / MANIFEST, json.dumps(manifest, indent=1).encode(), durable=True)
