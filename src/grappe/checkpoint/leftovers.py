"""Leftovers: finds what interrupted saves left on disk; needs no torch."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

from grappe.checkpoint.commit import strangers
from grappe.launch import files

LEFT = re.compile(r"\.(step-\d{6,}|old-step-\d{6,})\.\w+", re.ASCII)


def leftovers(folder: Path, older_than_seconds: float = 0.0) -> list[Path]:
    """Lists the folders that interrupted saves left on disk: those that hold nothing but files of a save.

    Raises:
        RunError: `folder` is a link.
    """
    now = time.time()
    left = []
    with contextlib.suppress(OSError):  # no such folder, or somebody else removes them just now
        for name in files.names(folder):
            entry = folder / name
            ours = LEFT.fullmatch(name) and files.kind(entry) == "folder" and not strangers(entry)
            if ours and now - entry.lstat().st_mtime >= older_than_seconds:
                left.append(entry)
    return left
