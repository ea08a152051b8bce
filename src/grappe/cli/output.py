"""Checks the file of --out before the work for it begins, and writes it at the end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from grappe.cli.exit import json_form
from grappe.errors import UsageError
from grappe.launch import files
from grappe.launch.rank import is_main_process
from grappe.launch.terminal import write as write_text


def check(file: Path | None, *endings: str, streams: bool = True) -> None:
    """Checks that `file` can be written.

    Args:
        endings: of which its name must have one; a pipe or a device, such as /dev/stdout, needs none.
        streams: whether a pipe or a device will do; otherwise the file is renamed into its place.

    Raises:
        UsageError: it has another ending, is a folder or a device, or its folder is missing or cannot be written to.
    """
    if file is not None and not streams and _is_device(file):
        raise UsageError(f"--out={file}: it is no regular file: give the name of a file, and read that")
    if file is None or _is_device(file):
        return
    if endings and file.suffix not in endings:
        raise UsageError(f"--out={file}: the name has to end in {', '.join(endings)}")
    if file.is_dir():
        raise UsageError(f"--out={file}: it is a folder: give the name of a file in it")
    folder = file.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"--out={file}: there is no folder {file.parent}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--out={file}: you may not write in {folder}: give another folder")


def write(file: Path | None, text: str) -> None:
    """Writes a file that `check` has checked, on the main process only; it appears whole, or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    if file is None or not is_main_process():
        return
    try:
        if _is_standard_output(file):
            write_text(text, end="")
        elif _is_device(file):
            file.write_text(text, encoding="utf-8")
        else:
            files.replace(file.resolve(), text.encode(errors="replace"))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def write_json(file: Path | None, kind: str, **content: Any) -> None:
    """Writes what --json prints, on several lines; raises as `write` does."""
    write(file, json.dumps(json_form(kind, content), indent=1, allow_nan=False) + "\n")


def _is_device(file: Path) -> bool:
    """Returns whether `file` is the standard output, a pipe or a device, which a rename would replace."""
    with contextlib.suppress(OSError):
        return _is_standard_output(file) or file.is_fifo() or file.is_char_device()
    return False


def _is_standard_output(file: Path) -> bool:
    """Returns whether `file` is the standard output, under any of its names: opened again, it would begin again."""
    with contextlib.suppress(OSError, ValueError):  # none is open; nothing of that name
        return os.path.samestat(file.stat(), os.fstat(sys.stdout.fileno()))
    return False
