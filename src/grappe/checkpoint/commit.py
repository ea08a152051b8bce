"""Commits a folder in one rename: every file is written to a temporary folder, flushed, and listed with its hash."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from grappe.errors import RunError
from grappe.launch import files

MANIFEST = "manifest.json"
READ_SIZE = 1 << 22
LARGEST_JSON = 1 << 25  # bytes; a larger state cannot be genuine
LARGEST_LIST = 1 << 22  # bytes, of a manifest or run.json; what is made of them takes 20 times as much memory
OURS = re.compile(r"\.?(rank-\d+\.safetensors(\.done)?|state\.json|manifest\.json)(\.[0-9a-f]{8})?", re.ASCII)
"""The files that a save makes."""

OLDER = "it was written by an older grappe, whose checkpoints do not record their run and step"

Fingerprint = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Place that a checkpoint belongs to; its manifest names it, since a folder can be renamed or copied."""

    step: int
    """Optimizer steps done."""
    run: str = ""
    """The run's id; "": it has none, as a hand-written loop."""
    samples: int = 0
    """Position in the data: training samples seen, over all epochs."""


def commit(temporary: Path, folder: Path, fingerprints: Mapping[str, Fingerprint], origin: Origin) -> None:
    """Renames the temporary folder `temporary`, whose files are on disk already, to `folder`: wholly, or not at all."""
    content = {**dataclasses.asdict(origin), "files": fingerprints}
    manifest = {**content, "xxh3_128": json_hash(content)}
    write_new(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
    files.flush(temporary, files.IN_PART)
    if files.kind(folder):
        if verify(folder, origin.run) is None:  # the same step, saved before
            files.remove_tree(temporary, files.IN_PART)
            return
        # A damaged checkpoint makes way, as a rename replaces empty folders only; files of others stay.
        if files.kind(folder) == "folder" and not strangers(folder):
            files.remove_tree(folder, files.IN_PART)
        else:
            files.rename(folder, folder.with_name(f"damaged-{folder.name}-{secrets.token_hex(4)}"), files.IN_PART)
    files.rename(temporary, folder, files.IN_PART)
    files.flush(folder.parent, files.IN_RUN)


def strangers(folder: Path) -> list[str]:
    """Lists files in a checkpoint's folder that no save puts there: grappe must not remove them."""
    try:
        listed = set(read_json(folder / MANIFEST, files.IN_CHECKPOINT, largest=LARGEST_LIST).get("files", {}))
    except (RunError, TypeError):
        listed = set()
    return [
        name
        for name in files.names(folder, files.IN_PART)
        if not (name in listed or OURS.fullmatch(name)) or files.kind(folder / name) == "folder"
    ]


def write_new(file: Path, content: bytes) -> Fingerprint:
    """Writes a new file and flushes it to disk; returns its fingerprint."""
    with files.new_file(file, files.IN_CHECKPOINT) as stream:
        write_all(stream.fileno(), content)
        os.fsync(stream.fileno())
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def write_all(handle: int, content: bytes | memoryview) -> int:
    """Writes all of it, however little the system takes at a time; returns its bytes."""
    view, done = memoryview(content), 0
    while done < len(view):
        done += os.write(handle, view[done:])
    return done


def verify(folder: Path, run: str = "") -> str | None:
    """Checks a committed folder against its manifest, and its place: returns what is wrong, or None.

    Args:
        run: the id of the run that it should be of; "": any.
    """
    try:
        manifest = read_json(folder / MANIFEST, files.IN_CHECKPOINT, largest=LARGEST_LIST)
        expected_hash = manifest.pop("xxh3_128", None)
        fingerprints = manifest["files"]
        if fingerprints and not manifest.keys() & {"step", "run"}:
            return OLDER
        for name, expected in fingerprints.items():
            file = folder / name
            if Path(name).name != name or files.kind(file) != "file":
                return f"its manifest names {name!r}, which is not a file in it"
            if fingerprint(file, int(expected["bytes"])) != expected:
                return f"{name} differs from what was saved"
        if expected_hash != json_hash(manifest):  # an altered name would hide a file
            return f"{MANIFEST} differs from what was saved"
        if folder.name != step_name(manifest["step"]):
            return f"it is the checkpoint of step {manifest['step']}, in a folder of another name"
        if run and manifest["run"] != run:
            return "it is a checkpoint of another run"
    except Exception as error:  # whatever error a manipulated manifest may lead to
        return f"its manifest or a file cannot be read: {error}"
    return None


def step_name(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def json_hash(content: Mapping[str, Any]) -> str:
    """Hashes a JSON value with XXH3; the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def fingerprint(file: Path, size: int | None = None) -> Fingerprint:
    """Reads a file's size in bytes and its XXH3 hash; a file without the expected `size` is not read."""
    digest = xxhash.xxh3_128()
    with files.reader(file, files.IN_CHECKPOINT) as stream:
        actual = os.fstat(stream.fileno()).st_size
        if size is not None and actual != size:
            return {"bytes": actual}
        while chunk := stream.read(READ_SIZE):
            digest.update(chunk)
    return {"bytes": actual, "xxh3_128": digest.hexdigest()}


def write_json(file: Path, content: object, levels: int = files.IN_RUN, *, new: bool = False) -> None:
    """Replaces a JSON file by one rename, so that no reader sees half of the file.

    Raises:
        FileExistsError: with `new`, there is one already.
    """
    files.replace(file, (json.dumps(content, indent=1) + "\n").encode(), levels, durable=True, new=new)


def read_json(file: Path, levels: int = files.IN_RUN, *, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Reads the object in a JSON file of at most `largest` bytes.

    Raises:
        RunError: the file cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(files.read_bytes(file, levels, largest=largest))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{file} should hold a JSON object")
    return content
