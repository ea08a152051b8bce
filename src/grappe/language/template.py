"""Template: a message's fixed text with named placeholders, matched with a message and filled in another language."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from string import Formatter

from grappe.language.places import ONE_WORD, OPEN, is_kept

LETTER = 16  # a letter's weight; a sign's is 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """An English template and its translation."""

    texts: tuple[str, ...]
    """The fixed texts: one before each placeholder, and one behind the last."""
    names: tuple[str, ...]
    """The placeholders, in order."""
    kept: frozenset[int]
    """The places of placeholders whose values are never translated."""
    open: frozenset[int]
    """The places of placeholders with words of grappe's."""
    one_word: frozenset[int]
    """The places of placeholders with one word."""
    longest: str
    weight: int
    """Amount of fixed text, letters before signs: of two templates that match, that with more is meant."""
    letters: int
    """Counts the letters of the fixed text, without its signs."""
    other: tuple[tuple[str, str | None], ...]
    """The translation: texts, each with the placeholder that follows it."""

    @classmethod
    def of(cls, english: str, other: str) -> Template:
        """Parses a template and its translation."""
        parts = pieces(english)
        texts = tuple(text for text, _ in parts)
        names = tuple(name for _, name in parts if name is not None)
        return cls(
            texts=texts,
            names=names,
            kept=frozenset(
                place
                for place, (before, behind) in enumerate(itertools.pairwise(texts))
                if is_kept(names[place], before, behind)
            ),
            open=frozenset(place for place, name in enumerate(names) if OPEN.fullmatch(name)),
            one_word=frozenset(place for place, name in enumerate(names) if ONE_WORD.fullmatch(name)),
            longest=max(texts, key=len),
            weight=sum(LETTER if character.isalnum() else 1 for text in texts for character in text),
            letters=sum(character.isalpha() for text in texts for character in text),
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
        values, place = list[str](), len(first)
        for number, fixed in enumerate(self.texts[1:-1]):
            earlier = self._earlier_value(number, values)
            adjacent = (
                earlier if not fixed and text.startswith(earlier, place) else ""
            )  # one more of a name known before
            there = text.find(fixed, place + len(adjacent), end)
            if there < 0:
                return None
            values.append(text[place:there])
            place = there + len(fixed)
        values.append(text[place:end])
        by_name = dict(zip(self.names, values, strict=True))
        if values != [by_name[name] for name in self.names] or any(
            " " in values[place] for place in self.one_word
        ):
            return None
        return values

    def starts(self, values: Sequence[str]) -> list[int]:
        """Returns where the placeholders' values begin in the text that they were found in."""
        lengths = itertools.accumulate(
            len(text) + len(value) for text, value in zip(self.texts, values, strict=False)
        )
        return [end - len(value) for end, value in zip(lengths, values, strict=True)]

    def _earlier_value(self, number: int, values: list[str]) -> str:
        """The value of an earlier placeholder of the same name; "" without one."""
        names = self.names[:number]
        return values[names.index(self.names[number])] if self.names[number] in names else ""

    def filled(self, values: Sequence[str]) -> str:
        """Returns the translation with the placeholders' values."""
        by_name = dict(zip(self.names, values, strict=True))
        return "".join(text + (by_name.get(name, "") if name else "") for text, name in self.other)


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
