"""PrivateName: an entry in a library's list of private names."""

from __future__ import annotations

from typing import NamedTuple


class PrivateName(NamedTuple):
    """A private name of a library, and the versions of the library that were seen to have it."""

    where: str
    """The module or class that has the name."""
    name: str
    versions: str
    """Releases in whose source the name was found; tests run with the pinned one."""
