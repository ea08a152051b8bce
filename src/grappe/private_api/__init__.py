"""Private names of torch, DeepSpeed, Lightning and torchmetrics that grappe uses: one file per library, and no other.

Each file lists its private names in USED; tests/private_api fails by name when a library no longer has one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
