"""Finds sites by the name of their TOML file: shipped ones, and the user's own in ~/.config/grappe/sites."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grappe.errors import UsageError, nearest
from grappe.errors.foreign_text import printable
from grappe.sites import schema
from grappe.sites.schema import Site

SHIPPED = Path(__file__).parent
GENERIC = "generic"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
LARGEST = 1 << 16  # bytes


def own_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of a user's own sites: $XDG_CONFIG_HOME/grappe/sites."""
    base = Path(environment.get("XDG_CONFIG_HOME") or "")
    if not base.is_absolute():  # as its specification says
        try:
            base = Path.home() / ".config"
        except RuntimeError:  # a user without a home, for example in a container
            base = Path(os.devnull)
    return base / "grappe" / "sites"


def files() -> dict[str, Path]:
    """Maps each site's name to its file; the user's own files win."""
    files_by_name: dict[str, Path] = {}
    for folder in (SHIPPED, own_folder()):
        if folder.is_dir():
            files_by_name |= {file.stem: file for file in sorted(folder.glob("*.toml")) if NAME.fullmatch(file.stem)}
    return files_by_name


def find(name: str, *, retired: bool = True) -> Site:
    """Reads the site called `name`.

    Args:
        retired: whether it may be one that takes no jobs any more.

    Raises:
        UsageError: there is no such site, its file is wrong, or it is retired; the message names its successor.
    """
    files_by_name = files()
    if name not in files_by_name:
        raise UsageError(
            f"no site '{name}': {nearest(name, files_by_name)} Another cluster is one TOML file in {own_folder()} "
            "(see docs/another-cluster.md), or --site generic"
        )
    file = files_by_name[name]
    site = schema.site(name, _content(file), str(file))
    if site.retired and not retired:
        raise UsageError(f"{site.name} is retired: {site.retired}. There is: grappe sites")
    return site


def _content(file: Path) -> dict[str, Any]:
    """Reads a site's file, completed by that of the shipped file that it is `like`; its own values count."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UsageError(f"{file} is not a regular file: a site is a TOML file")
            raw = os.read(handle, LARGEST + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    if len(raw) > LARGEST:
        raise UsageError(f"{file} has more than {LARGEST:,} bytes, and a site's file a few thousand at most")
    try:
        content = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also of an integer of thousands of digits
        raise UsageError(f"{file}: {error}") from error
    like = content.pop("like", None)
    if like is None:
        return content
    name = like.removeprefix("_") if isinstance(like, str) else ""  # no site: what several share
    if not NAME.fullmatch(name) or not (shipped := SHIPPED / f"{like}.toml").is_file():
        raise UsageError(f"{file}: like={printable(like, 80)!r} is not the name of a site that grappe has")
    return _merged(_content(shipped), content)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merges tables, and takes all else from `own` where it has it."""
    tables = {key for key in base.keys() & own.keys() if isinstance(base[key], dict) and isinstance(own[key], dict)}
    return {**base, **own, **{key: _merged(base[key], own[key]) for key in tables}}


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
