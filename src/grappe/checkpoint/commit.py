"""Commits a folder in one rename: every file is written to a temporary folder, flushed, and listed with its hash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from grappe.errors import RunError

MANIFEST = "manifest.json"
READ_SIZE = 1 << 22
LARGEST_JSON = 1 << 25  # bytes; a state of more is a lie
LARGEST_LIST = 1 << 22  # bytes, of a manifest or run.json; what is made of them takes 20 times as much memory

Fingerprint = dict[str, Any]


def commit(beside: Path, folder: Path, files: Mapping[str, Fingerprint]) -> None:
    """Renames the temporary folder `beside`, whose `files` are on disk already, to `folder`: wholly, or not at all."""
    manifest = {"files": files, "xxh3_128": json_hash(files)}
    write_new(beside / MANIFEST, json.dumps(manifest, indent=1).encode())
    flush(beside)
    if folder.exists():
        if verify(folder) is None:  # the same step, saved before
            shutil.rmtree(beside)
            return
        shutil.rmtree(folder)  # damaged; a rename cannot replace a folder that is not empty
    beside.rename(folder)
    flush(folder.parent)


def write_new(file: Path, content: bytes) -> Fingerprint:
    """Writes a new file and flushes it to disk; returns its fingerprint."""
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def verify(folder: Path) -> str | None:
    """Checks a committed folder against its manifest: returns what is wrong, or None."""
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_LIST)
        files = manifest["files"]
        for name, expected in files.items():
            file = folder / name
            if Path(name).name != name or file.is_symlink() or not file.is_file():
                return f"its manifest names {name!r}, which is no file in it"
            if fingerprint(file, int(expected["bytes"])) != expected:
                return f"{name} is not what was saved"
        if manifest["xxh3_128"] != json_hash(files):  # one name turned into another would hide a file
            return f"{MANIFEST} is not what was saved"
    except Exception as error:  # whatever a manifest that lies may lead to
        return f"its manifest or a file cannot be read: {error}"
    return None


def json_hash(content: Mapping[str, Any]) -> str:
    """Hashes a JSON value with XXH3; the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def fingerprint(file: Path, size: int | None = None) -> Fingerprint:
    """Reads a file's size in bytes and its XXH3 hash; a file without the expected `size` is not read."""
    actual = file.stat().st_size
    if size is not None and actual != size:
        return {"bytes": actual}
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_SIZE):
            digest.update(chunk)
    return {"bytes": actual, "xxh3_128": digest.hexdigest()}


def write_json(file: Path, content: object) -> None:
    """Replaces a JSON file by one rename, so that no reader sees half of the file."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    write_new(beside, (json.dumps(content, indent=1) + "\n").encode())
    beside.replace(file)
    flush(file.parent)


def read_json(file: Path, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Reads the object in a JSON file of at most `largest` bytes.

    Raises:
        RunError: the file cannot be read, or is no JSON object.
    """
    try:
        if file.exists() and not file.is_file():
            raise RunError(f"{file} is no file")  # reading from a pipe would wait forever
        if file.stat().st_size > largest:
            raise RunError(f"{file} is larger than any that grappe writes")
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{file} should hold a JSON object")
    return content


def flush(folder: Path) -> None:
    """Flushes a folder's entries (fsync), so that files created, renamed or removed in `folder` are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
