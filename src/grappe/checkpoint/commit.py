"""Commits a folder: written beside, hashed into a manifest, flushed to disk, renamed; verified when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grappe.errors import RunError

MANIFEST = "manifest.json"
READ_SIZE = 1 << 20


@contextmanager
def committed(folder: Path) -> Iterator[Path]:
    """Yields a new folder to write into; it becomes `folder` in one rename once all of it is on disk."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        files = {file.name: _fingerprint(file) for file in sorted(beside.iterdir())}
        (beside / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
        for file in beside.iterdir():
            _flush(file)
        _flush(beside)
        if folder.exists():  # the same step, saved again after a resume: what is there is as good
            shutil.rmtree(folder)
        beside.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def verify(folder: Path) -> str | None:
    """What is wrong with a committed folder; None when every file is as its manifest says."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            if Path(name).name != name:
                return f"{name} is not a plain file name"
            if _fingerprint(folder / name) != expected:
                return f"{name} is not what was saved"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest or a file cannot be read: {error}"
    return None


def write_json(file: Path, content: object) -> None:
    """Replaces a JSON file in one step, so that nobody ever reads half of it."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    _flush(beside)
    beside.replace(file)
    _flush(file.parent)


def read_json(file: Path) -> dict:
    """The object in a JSON file.

    Raises:
        RunError: it cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{file} should hold a JSON object")
    return content


def _fingerprint(file: Path) -> dict[str, object]:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_SIZE):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
