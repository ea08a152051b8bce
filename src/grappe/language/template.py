"""Template: a message's fixed text with named placeholders, matched with a message and filled in another language."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from string import Formatter

LETTER = 16  # a letter's weight; a sign's is 1
QUOTES = ("'", '"', "`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """An English template and its translation."""

    texts: tuple[str, ...]
    """The fixed texts: one before each placeholder, and one behind the last."""
    names: tuple[str, ...]
    """The placeholders, in order."""
    quoted: frozenset[int]
    """The places of placeholders in quotation marks: names, which are never translated."""
    longest: str
    weight: int
    """Amount of fixed text, letters before signs: of two templates that match, that with more is meant."""
    other: tuple[tuple[str, str | None], ...]
    """The translation: texts, each with the placeholder that follows it."""

    @classmethod
    def of(cls, english: str, other: str) -> Template:
        """Parses a template and its translation."""
        parts = pieces(english)
        texts = tuple(text for text, _ in parts)
        return cls(
            texts=texts,
            names=tuple(name for _, name in parts if name is not None),
            quoted=frozenset(
                place
                for place, (before, behind) in enumerate(pairwise(texts))
                if before.endswith(QUOTES) and behind.startswith(before[-1])
            ),
            longest=max(texts, key=len),
            weight=sum(LETTER if one.isalnum() else 1 for text in texts for one in text),
            other=tuple(pieces(other)),
        )

    def values(self, text: str) -> list[str] | None:
        """Returns the placeholders' values in a text; None: the text is not made of this template."""
        first, *_, last = self.texts if len(self.texts) > 1 else (*self.texts, "")
        if self.longest not in text or not text.startswith(first):
            return None
        if len(self.texts) == 1:
            return [] if text == first else None
        end = len(text) - len(last)
        if not text.endswith(last) or end < len(first):
            return None
        found, place = list[str](), len(first)
        for number, fixed in enumerate(self.texts[1:-1]):
            known = self._known(number, found)
            adjacent = (
                known if not fixed and text.startswith(known, place) else ""
            )  # one more of a name known before
            there = text.find(fixed, place + len(adjacent), end)
            if there < 0:
                return None
            found.append(text[place:there])
            place = there + len(fixed)
        return [*found, text[place:end]]

    def _known(self, number: int, found: list[str]) -> str:
        """The value of an earlier placeholder of the same name; "" without one."""
        names = self.names[:number]
        return found[names.index(self.names[number])] if self.names[number] in names else ""

    def filled(self, values: Sequence[str]) -> str:
        """Returns the translation with the placeholders' values."""
        given = dict(zip(self.names, values, strict=True))
        return "".join(text + (given.get(name, "") if name else "") for text, name in self.other)


def pieces(template: str) -> list[tuple[str, str | None]]:
    """Parses a template: each fixed text with the placeholder behind it, the last without one.

    Raises:
        ValueError: a brace is neither doubled nor one of a placeholder.
    """
    parts: list[tuple[str, str | None]] = []
    text = ""
    for fixed, name, _, _ in Formatter().parse(template):
        text += fixed
        if name is not None:
            parts.append((text, name))
            text = ""
    return [*parts, (text, None)]
