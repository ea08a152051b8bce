"""Finds extensions by their folder in contrib/: to add one, add a folder, and to do without it, delete it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from grappe.errors import UsageError

FOLDER = Path(__file__).with_name("contrib")


def having(part: str) -> list[str]:
    """Lists the extensions that have a module of this name: engine, commands."""
    return sorted(file.parent.name for file in FOLDER.glob(f"*/{part}.py"))


def module(name: str, part: str) -> ModuleType:
    """Imports a module of an extension.

    Raises:
        UsageError: this installation lacks the extension.
    """
    if name not in having(part):
        raise UsageError(f"this needs the extension '{name}', which this installation lacks: install grappe whole")
    return importlib.import_module(f"grappe.contrib.{name}.{part}")
