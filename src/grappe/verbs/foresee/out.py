"""Out: checks that the file of --out can be written, before there is anything to write, and writes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from grappe.errors import UsageError
from grappe.launch import files


def check_out(file: Path, *, history: bool = False) -> None:
    """Checks the file's name and its folder.

    Raises:
        UsageError: the name has another ending, or the file cannot be written.
    """
    if history and file.suffix not in (".json", ".csv"):
        raise UsageError(f"--out={file}: the name has to end in .json or .csv")
    if not history and file.suffix != ".json":
        raise UsageError(f"--out={file}: the name has to end in .json (with --history also in .csv)")
    if not file.parent.is_dir():
        raise _unwritable(file, os.strerror(errno.ENOENT))
    if file.is_dir():
        raise _unwritable(file, os.strerror(errno.EISDIR))
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise _unwritable(file, os.strerror(errno.EACCES))


def write_out(file: Path, text: str) -> None:
    """Writes `text` to the file of --out.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        files.replace(file, text.encode())
    except OSError as error:
        raise _unwritable(file, error.strerror) from error


def _unwritable(file: Path, why: str | None) -> UsageError:
    return UsageError(f"{file} cannot be written: {why}: give another with --out")
