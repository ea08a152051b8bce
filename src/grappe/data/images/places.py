"""Finds where a source's index and quarantine are kept: beside the source, or in the user's own folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from grappe.data.images import index as files
from grappe.data.images.index import Index, LabelFiles, Stale
from grappe.data.images.listing import Said
from grappe.data.images.sources import listing
from grappe.errors import DataError
from grappe.launch.folders import own_folder, state_base
from grappe.launch.terminal import complain

INDEX = ".grappe.npy"
QUARANTINE = ".quarantine.txt"


def places(source: Path, ending: str) -> list[Path]:
    """Lists where a file that belongs to a source may lie, in order of preference."""
    source = source.absolute()
    found = [source.with_name(source.name + ending)]
    own = _own()
    if own is not None:
        found.append(own / f"{source.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(source))}{ending}")
    return found


def open_index(
    source: Path,
    labels: Path | None = None,
    numbering: Path | None = None,
    *,
    again: bool = False,
    said: Said | None = None,
) -> tuple[Index, Path]:
    """Maps a source's index, and makes it first where there is none, or one of another state; and the index's file.

    Args:
        again: whether to make it in any case.

    Raises:
        DataError: the source is damaged, missing or has no images.
    """
    of = (labels, numbering)
    if not again and (found := _read(source, of)[0]) is not None:
        return found
    with _locked(source):
        found, why = (None, "asked for") if again else _read(source, of)  # another process may have made it
        if found is not None:
            return found
        return _made(source, of, why, said or (lambda words: None))


def _read(source: Path, of: LabelFiles) -> tuple[tuple[Index, Path] | None, str]:
    why = ""
    for file in places(source, INDEX):
        if file.is_file():
            try:
                return (files.read(file, source, of), file), ""
            except Stale as error:
                why = why or f"{file}: {error}"
    return None, why


def _made(source: Path, of: LabelFiles, why: str, said: Said) -> tuple[Index, Path]:
    complain(f"grappe: reading the headers of {source}, once" + (f" ({why})" if why else ""))
    listed = listing(source, *of, said)
    problems = []
    for file in places(source, INDEX):
        try:
            files.write(file, source, listed, of)
            return files.read(file, source, of), file
        except OSError as error:
            problems.append(f"{file}: {error.strerror or error}")
        except Stale as error:
            raise DataError(f"{source} changes while it is read ({error}): wait until it is whole") from None
    raise DataError(f"the index of {source} can be written nowhere: {'; '.join(problems)}")


@contextlib.contextmanager
def _locked(source: Path) -> Iterator[None]:
    """Context that processes of a node enter one after the other, where there is a folder for it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = places(source, ".lock")[-1]
            if lock.parent == _own():
                file = stack.enter_context(lock.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _own() -> Path | None:
    base = state_base()
    return None if base is None else own_folder(base / "grappe" / "images")
