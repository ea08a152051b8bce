"""Finds sites by the name of their TOML file: shipped ones, and the user's own in ~/.config/grappe/sites."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from grappe.errors import UsageError, nearest
from grappe.sites import schema
from grappe.sites.schema import Site

SHIPPED = Path(__file__).parent
GENERIC = "generic"


def own_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of a user's own sites: $XDG_CONFIG_HOME/grappe/sites."""
    base = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "grappe" / "sites"


def files() -> dict[str, Path]:
    """Maps each site's name to its file; the user's own files win."""
    found: dict[str, Path] = {}
    for folder in (SHIPPED, own_folder()):
        if folder.is_dir():
            found |= {file.stem: file for file in sorted(folder.glob("*.toml"))}
    return found


def find(name: str) -> Site:
    """Reads the site called `name`.

    Raises:
        UsageError: there is no such site, or its file is wrong.
    """
    known = files()
    if name not in known:
        raise UsageError(
            f"no site '{name}': {nearest(name, known)} Another cluster is one TOML file in {own_folder()} "
            "(see docs/slurm.md), or --site generic"
        )
    file = known[name]
    try:
        content = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from error
    return schema.site(name, content, str(file))


def current(environment: Mapping[str, str] = os.environ) -> str:
    """Detects the site of this login node by environment variables; else returns the generic site."""
    for name in files():
        try:
            expected = find(name).detect
        except UsageError:
            continue  # a broken file of one's own must not hide the others
        if expected and all(environment.get(key) == value for key, value in expected.items()):
            return name
    return GENERIC
