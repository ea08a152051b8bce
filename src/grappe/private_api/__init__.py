"""Private names of torch, DeepSpeed, Lightning and torchmetrics that grappe uses: one file per library, and no other.

Each file lists its private names in USED; tests/private_api fails by name when a library no longer has one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from grappe.errors import UsageError

OLDEST, NEWEST = (2, 8), (2, 15)
"""The first and the last torch on which the tests have passed: `make oldest`, `make newest`."""
WARNED = "GRAPPE_TORCH_WARNED"
"""The variable that is set in processes whose user has been warned of a torch that is too new."""


class PrivateName(NamedTuple):
    """A private name of a library, and the library's versions that have it."""

    where: str
    """The module or class with the name."""
    name: str
    versions: str
    """Releases whose source contains the name; tests run with the pinned release."""


def private_names(versions: str, names: Mapping[str, str]) -> tuple[PrivateName, ...]:
    """Lists private names that are written, by module or class, with spaces between."""
    return tuple(PrivateName(where, name, versions) for where, text in names.items() for name in text.split())


def check_torch(version: str, names: Iterable[PrivateName] = ()) -> str:
    """Returns a warning of a torch that is newer than those that were tested, the first time; "" otherwise.

    Args:
        names: torch's private names, which are looked up in a torch that was not tested.

    Raises:
        UsageError: this torch is too old, or has lost one of the names.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    first, last = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    if release < OLDEST:
        raise UsageError(f"torch {version} is too old: grappe needs {first} or newer: pip install 'torch>={first}'")
    if release <= NEWEST:
        return ""
    if gone := [f"{entry.where}.{entry.name}" for entry in names if not has(entry.where, entry.name)]:
        raise UsageError(
            f"torch {version} is newer than what grappe is tested with (up to {last}), and has no {', '.join(gone)} "
            f"any more, which grappe uses: pip install 'torch=={last}.*'"
        )
    if os.environ.get(WARNED) or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return ""
    os.environ[WARNED] = version  # the processes that this one starts need not say it again
    return f"warning: grappe is tested up to torch {last}, and this is {version}: it works if `make quick` does"


def has(where: str, name: str) -> bool:
    """Returns whether a module or class has the attribute, or its source gives it to an object."""
    try:
        owner = _resolved(where)
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, name):
        return True
    if hasattr(owner, "__path__"):  # a package
        return importlib.util.find_spec(f"{where}.{name}") is not None
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    except (OSError, TypeError):  # no source to look into
        return False


def _resolved(where: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError:
        place, _, name = where.rpartition(".")
        return getattr(_resolved(place), name)
