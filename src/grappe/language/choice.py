"""Chooses the language of help and messages: by GRAPPE_LANG, or by the locale."""

from __future__ import annotations

import os
import re

VARIABLE = "GRAPPE_LANG"
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides, as everywhere in POSIX."""
LANGUAGES = {"en": "en", "english": "en", "c": "en", "posix": "en", "fr": "fr", "french": "fr"}


def chosen_language() -> str:
    """Returns "fr" or "en"."""
    if asked := os.environ.get(VARIABLE):
        return LANGUAGES.get(_code(asked), "en")
    locale = next((value for name in LOCALE if (value := os.environ.get(name))), "")
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
