"""Private names of Python's gettext, which looks up a message and does not list them."""

from __future__ import annotations

import gettext
from collections.abc import Mapping
from pathlib import Path

from grappe.private_api import PrivateName

USED = (PrivateName("gettext.GNUTranslations", "_catalog", "Python 3.11"),)


def messages_of(file: Path) -> Mapping[str, str]:
    """Returns all translations of a .mo file by the English text."""
    with file.open("rb") as stream:
        return gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
