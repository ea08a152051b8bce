"""Shows help and messages in the user's language; English is the default and the fallback."""

from __future__ import annotations

import functools
from typing import IO, TYPE_CHECKING

from grappe.language.choice import chosen_language

if TYPE_CHECKING:
    from grappe.language.catalogue import Catalogue

__all__ = ["catalogue_of", "translated"]


def translated(text: object, stream: IO[str] | object = None) -> object:
    """Returns a message in the user's language; as it is in English, or where no translation is known.

    Args:
        stream: what the message will be written to; letters that its encoding lacks are written plainly (oe, e).
    """
    language = chosen_language()
    if language == "en":
        return text
    return catalogue_of(language, str(getattr(stream, "encoding", None) or "utf-8")).message(str(text))


@functools.cache
def catalogue_of(language: str, encoding: str = "utf-8") -> Catalogue:
    """Returns the translations into a language, for a terminal of an encoding."""
    from grappe.language.catalogue import read  # nobody who reads English waits for this

    return read(language, encoding)
