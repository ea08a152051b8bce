"""PrivateName: an entry in a library's list of private names."""

from __future__ import annotations

from typing import NamedTuple


class PrivateName(NamedTuple):
    """A private name of a library, and the library's versions that have it."""

    where: str
    """The module or class with the name."""
    name: str
    versions: str
    """Releases whose source contains the name; tests run with the pinned release."""
