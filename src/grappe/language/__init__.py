"""Shows help and messages in the user's language; English is the default and the fallback."""

from __future__ import annotations

import functools
import os
import re
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from grappe.language.catalogue import Catalogue

__all__ = ["catalogue_of", "translated", "translated_cell", "translated_line", "translated_name", "translated_numbers"]


VARIABLE = "GRAPPE_LANG"
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides, as everywhere in POSIX."""
LANGUAGES = {"en": "en", "english": "en", "c": "en", "posix": "en", "fr": "fr", "french": "fr"}


def chosen_language() -> str:
    """Returns "fr" or "en"."""
    locale = next((value for name in (VARIABLE, *LOCALE) if (value := os.environ.get(name))), "")
    return LANGUAGES.get(_code(locale), "en")


def unknown_language() -> str | None:
    """Returns a line for the user where GRAPPE_LANG asks for a language that there is not."""
    asked = os.environ.get(VARIABLE, "")
    if not asked or _code(asked) in LANGUAGES:
        return None
    return f"{VARIABLE}={asked}: grappe has en and fr, and takes English"


def _code(locale: str) -> str:
    """The language of a locale: fr of fr_CA.UTF-8."""
    return re.split(r"[-_.@]", locale, maxsplit=1)[0].lower()


STATES = frozenset({"failed", "finished", "interrupted", "paused", "running", "stopped", "unknown"})
STATES |= {"NO", "best", "different", "no", "same", "yes"}
"""Cells of one word that are translated: no other may be the name of a field, a metric or a file."""


def translated(text: object, stream: IO[str] | object = None) -> object:
    """Returns a message in the user's language; as it is in English, or where no translation is known.

    Args:
        stream: what the message will be written to; letters that its encoding lacks are written plainly (oe, e).
    """
    catalogue = _catalogue_for(stream)
    return text if catalogue is None else catalogue.message(str(text))


def translated_cell(text: str, stream: object = None) -> str:
    """Returns a table's cell in the user's language; one word only if it is one of STATES, or a number."""
    is_text = " " in text.strip() or text in STATES or text[:1].isdigit()
    return translated_line(text, stream) if is_text else translated_numbers(text, stream)


def translated_line(line: str, stream: object = None) -> str:
    """Returns a line of results in the user's language, if enough of it is known: others may have written it."""
    catalogue = _catalogue_for(stream)
    return line if catalogue is None else catalogue.result(line)


def translated_numbers(text: str, stream: object = None) -> str:
    """Returns a text of numbers and names with the numbers as the user's language writes them."""
    catalogue = _catalogue_for(stream)
    return text if catalogue is None else catalogue.numbers(text)


def translated_name(name: str, stream: object = None) -> str:
    """Returns the name of a table's column or row in the user's language."""
    catalogue = _catalogue_for(stream)
    return name if catalogue is None else catalogue.name(name)


def _catalogue_for(stream: object) -> Catalogue | None:
    """Returns the translations for a stream, which may have a language of its own; None: English."""
    language = getattr(stream, "language", None) or chosen_language()
    return None if language == "en" else catalogue_of(language, str(getattr(stream, "encoding", None) or "utf-8"))


@functools.cache
def catalogue_of(language: str, encoding: str = "utf-8") -> Catalogue:
    """Returns the translations into a language, for a terminal of an encoding."""
    from grappe.language.catalogue import read  # nobody who reads English waits for this

    return read(language, encoding)
