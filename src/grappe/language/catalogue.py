"""Translates English messages by the templates that they were made of: "no task 'x'" by "no task '{name}'"."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from grappe.language.template import Template
from grappe.private_api.gettext import messages_of

DEEPEST = 6  # messages within messages
MOST = 500  # parts of one message that are looked at
LONGEST = 20_000  # characters: more is no message of grappe's
PLACES = 40  # ends of sentences at which a text is cut
ENDS = (". ", "; ", ": ", "\n", ", ")
NAMES = re.compile(r"\S+(?: or \S+)+")
PLAIN = str.maketrans({"œ": "oe", "Œ": "OE", "…": "...", "’": "'", "«": '"', "»": '"', "×": "x"})


class Catalogue:
    """The translations into one language.

    Args:
        translations: by the English text; placeholders are names in braces.
    """

    def __init__(self, translations: Mapping[str, str]) -> None:
        self._texts = translations

    def text(self, english: str) -> str:
        """Returns the translation of a fixed text, of help say; the text itself without one."""
        return self._texts.get(english) or english

    def message(self, english: str) -> str:
        """Returns the translation of a message; what is not known in it stays as it is."""
        if len(english) > LONGEST:
            return english
        return _Message(self._templates, self.text(" or ")).best(english, 0)[1]

    @functools.cached_property
    def _templates(self) -> list[Template]:
        return [Template.of(english, other) for english, other in self._texts.items()]


class _Message:
    """Translates one message: by the templates that have most of it in common, those of its values included."""

    def __init__(self, templates: list[Template], listing: str) -> None:
        self._templates = templates
        self._listing = listing
        self._found: dict[str, tuple[int, str]] = {}

    def best(self, text: str, depth: int) -> tuple[int, str]:
        """Returns how many characters of a text are known, and its translation."""
        if depth > DEEPEST or " " not in text.strip() or len(self._found) > MOST:
            return 0, text
        if text not in self._found:
            self._found[text] = 0, text  # while it is looked for
            self._found[text] = self._whole(text, depth) or self._sentences(text, depth)
        return self._found[text]

    def _whole(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation by one template; None: none is this text's."""
        found = []
        for template in self._templates:
            values = template.values(text)
            if values is not None:
                inside = [
                    (0, one) if place in template.quoted else self.best(one, depth + 1)
                    for place, one in enumerate(values)
                ]
                weight = template.weight + sum(known for known, _ in inside)
                found.append((weight, template.filled([one for _, one in inside])))
        return max(found, key=lambda one: one[0]) if found else None

    def _sentences(self, text: str, depth: int) -> tuple[int, str]:
        """The translation of a text's known sentences, or of a list of names."""
        if NAMES.fullmatch(text):
            return 0, text.replace(" or ", self._listing)
        for place, end in _ends(text):
            head, tail = text[:place], text[place + len(end) :]
            for known, other, is_head in ((tail, head, False), (head, tail, True)):
                found = self._whole(known, depth + 1) if " " in known else None
                if found is not None:
                    more, rest = self.best(other, depth + 1)
                    parts = (found[1], rest) if is_head else (rest, found[1])
                    return found[0] + more, end.join(parts)
        return 0, text


def read(language: str, encoding: str) -> Catalogue:
    """Returns a language's catalogue, its letters such as an encoding has."""
    found = messages_of(Path(__file__).with_name(f"{language}.mo"))
    return Catalogue({english: encodable(other, encoding) for english, other in found.items() if english})


def encodable(text: str, encoding: str) -> str:
    """Returns the text; without accents and ligatures where the encoding lacks one of its characters."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        text = text.translate(PLAIN)
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return text


def _ends(text: str) -> Iterable[tuple[int, str]]:
    """The first places where a sentence may end, and what ends it."""
    found = ((place, end) for end in ENDS for place in _places(text, end))
    return sorted(found)[:PLACES]


def _places(text: str, end: str) -> Iterable[int]:
    place = text.find(end)
    while place >= 0:
        yield place
        place = text.find(end, place + 1)
