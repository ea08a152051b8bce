"""Keeps, outside of all exports, which packages this user has made here: grappe opens no other.

See docs/decisions/export.md. A record is a file of the user's state folder, named by the package's hash.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grappe.checkpoint.commit import read_json
from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.folders import state_folder

FOLDER = "exports"
HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


def write_record(made: str, known: dict[str, Any]) -> bool:
    """Writes down what is known of the package of SHA-256 `made`; returns whether it could be kept."""
    folder = state_folder(FOLDER, make=True)
    if folder is None:
        return False
    try:
        files.replace(folder / f"{made}.json", json.dumps(known).encode(), mode=files.PRIVATE)
    except (OSError, RunError):
        return False
    return True


def read_record(made: str) -> dict[str, Any] | None:
    """Returns what `write_record` wrote; None: the package was not made here by this user, as far as is known."""
    folder = state_folder(FOLDER, make=False)
    if folder is None or not HASH.fullmatch(made):
        return None
    try:
        return read_json(folder / f"{made}.json")
    except RunError:
        return None
