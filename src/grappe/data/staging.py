"""Stages data: copies a file or a folder to a disk of the node, once for all of its processes, with checksums."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import xxhash

from grappe.data.images.index import INDEX, QUARANTINE
from grappe.data.shards.open_file import Facts, facts_of
from grappe.errors import DISK_IS_FULL, DataError, UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import files

_CHUNK = 1 << 22  # bytes
_SPARE = 1 << 20  # bytes that a disk is to have left
_UNFINISHED = ".staging"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """A copy of data that is whole."""

    place: Path
    """Place of the copy."""
    files: int
    bytes: int
    copied: int
    """Files that this call has copied; the others were there."""


def stage(source: Path | str, to: Path | str) -> Path:
    """Copies a file or folder into the folder `to`, on a disk of the node, and returns the copy's place.

    For a task's `data`: all processes of a node may call it at once; one copies, the others wait. What is there
    already, of the same sizes and times, is not copied again. An index or quarantine next to the source is copied, too.

    Raises:
        DataError: the source is missing, changes meanwhile, or was read wrongly; or the disk is too small.
        UsageError: `to` lies in the source, or has something else of its name.
    """
    return copied(Path(source), Path(to)).place


def planned(source: Path, to: Path) -> Staged:
    """Returns what `copied` would return, and copies nothing.

    Raises:
        DataError: the source is missing, or has something that is no file.
        UsageError: `to` lies in the source.
    """
    return _copied(*_checked_places(source, to), None)


def copied(source: Path, to: Path, report: Callable[[int, int], None] = lambda done, total: None) -> Staged:
    """Copies as `stage` does; `report` is called with how many bytes of how many are there."""
    source, to = _checked_places(source, to)
    try:
        to.mkdir(parents=True, exist_ok=True)
        with files.appender(to / f".{source.name}.stage.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a node's processes come one after the other
            return _copied(source, to, report)
    except OSError as error:
        full = "make room and " if error.errno in DISK_IS_FULL else ""
        where = f": {printable(error.filename)}" if error.filename else ""
        raise DataError(
            f"{source} cannot be staged to {to}{where}: {error.strerror or error}. Complete copies stay: {full}"
            "start the same command again"
        ) from None


def _checked_places(source: Path, to: Path) -> tuple[Path, Path]:
    source, to = source.absolute(), to.absolute()
    if to == source or to.is_relative_to(source) or to == source.parent:
        raise UsageError(f"--out {to}: that is where the source is")
    return source, to


def _copied(source: Path, to: Path, report: Callable[[int, int], None] | None) -> Staged:
    """Copies what is missing; without `report` only says what that is."""
    if not source.exists():
        raise DataError(f"{source}: there is no such file or folder")
    sources, record = dict[str, Facts](), to / f".{source.name}.staged.json"
    for place in (*_walk(source), *filter(Path.is_file, _sidecars(source))):
        if not place.is_file():
            raise DataError(f"{printable(place)} is not a file: it cannot be staged")
        sources[str(place.relative_to(source.parent))] = facts_of(place)
    recorded: set[str] | None = set()  # the files that a copy has begun with; None: there was none
    try:
        recorded = msgspec.json.decode(files.read_bytes(record), type=set[str])
    except FileNotFoundError:
        recorded = None
    except (OSError, msgspec.DecodeError, RecursionError):
        pass
    missing = {name: facts for name, facts in sources.items() if recorded is None or not _is_there(to / name, facts)}
    total, needed = (sum(size for size, _ in some.values()) for some in (sources, missing))
    staged = Staged(place=to / source.name, files=len(sources), bytes=total, copied=len(missing))
    if report is None:
        return staged
    names = set(sources)
    _remove_others(to, source, names, recorded)
    room = shutil.disk_usage(to).free
    if missing and room < needed + _SPARE:
        raise DataError(
            f"{source} does not fit into {to}: {needed / 1e9:.1f} GB are needed, {room / 1e9:.1f} GB are free"
        )
    if recorded != names:  # before the first file: what a killed process leaves is known to be a copy
        files.replace(record, json.dumps(sorted(names | (recorded or set()))).encode(), durable=True)
    done = total - needed
    for name, facts in missing.items():
        _copy(source.parent / name, to / name, facts)
        done += facts[0]
        report(done, total)
    if source.is_dir():
        for folder, _, _ in os.walk(to / source.name):  # an index of images has folders' times
            _, time = facts_of(source / Path(folder).relative_to(to / source.name))
            os.utime(folder, ns=(time, time))
    return staged


def _sidecars(source: Path) -> list[Path]:
    return [source.with_name(source.name + ending) for ending in (INDEX, QUARANTINE)]


def _walk(source: Path) -> Iterator[Path]:
    if not source.is_dir():
        yield source
        return
    for folder, folders, names in os.walk(source, onerror=_raised):
        folders.sort()
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise DataError(
                    f"{printable(Path(folder) / name)} is a link to a folder: stage that folder by its own name"
                )
        yield from (Path(folder) / name for name in sorted(names))


def _raised(error: OSError) -> NoReturn:
    """Raises what os.walk would pass over: a folder that cannot be read is not one without files."""
    raise error


def _is_there(place: Path, facts: Facts) -> bool:
    """Returns whether a file was copied: it has its name and its time only once its content was read to be right."""
    try:
        return facts_of(place) == facts
    except OSError:
        return False


def _remove_others(to: Path, source: Path, names: set[str], recorded: set[str] | None) -> None:
    """Removes files of an earlier copy that the source lacks now; refuses files that no copy has made."""
    place = to / source.name
    sidecars = [source.name, *(each.name for each in _sidecars(source))]
    for left in sorted(to.iterdir()):  # of a single file, copies that a killed process has left lie here
        if any(left.name.startswith(f".{name}.") for name in sidecars) and _is_unfinished(left, to, names):
            left.unlink()
    for name in sidecars[1:]:
        if recorded is not None and name in recorded - names:
            (to / name).unlink(missing_ok=True)
    if place.is_symlink():
        raise UsageError(f"{place} is a link: name another folder with --out")
    if not place.exists():
        return
    if recorded is None:
        raise UsageError(f"{place} is there and was not staged by grappe: name another folder with --out")
    for path in _walk(place):
        name = str(path.relative_to(to))
        if _is_unfinished(path, to, names) or name in recorded - names:
            path.unlink()
        elif name not in names:
            raise UsageError(
                f"{printable(path)} was not staged by grappe: remove it, or name another folder with --out"
            )


def _is_unfinished(path: Path, to: Path, names: set[str]) -> bool:
    """Returns whether a file is a copy that was not ended: of our own form of name, and none of the source's."""
    ours = path.name.startswith(".") and path.name.endswith(_UNFINISHED)
    return ours and str(path.relative_to(to)) not in names


def _copy(source: Path, place: Path, facts: Facts) -> None:
    """Copies a file, and reads the copy: it is there whole and right, or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    digest = xxhash.xxh3_128()
    try:
        with source.open("rb") as stream, temporary.open("xb") as copy:
            while content := stream.read(_CHUNK):
                digest.update(content)
                copy.write(content)
            copy.flush()
            if facts[0] > _CHUNK:
                os.fsync(copy.fileno())  # else the copy would be read from memory
            unchanged = facts_of(stream.fileno()) == facts
        if not unchanged:
            raise DataError(f"{printable(source)} changes while it is copied: wait until it is whole")
        if _hash(temporary) != digest.hexdigest():
            raise DataError(f"{printable(place)} reads otherwise than it was written: this disk is damaged")
        os.utime(temporary, ns=(facts[1], facts[1]))
        temporary.rename(place)
    finally:
        temporary.unlink(missing_ok=True)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        with contextlib.suppress(OSError, AttributeError):  # from the disk, where the system can be asked to
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
