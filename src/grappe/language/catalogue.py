"""Translates English messages by the templates that they were made of: "no task 'x'" by "no task '{name}'"."""

from __future__ import annotations

import contextlib
import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from grappe.language.template import Template
from grappe.private_api.gettext import messages_of

DEEPEST = 6  # messages within messages
MOST = 500  # parts of one message that are looked at
LONGEST = 20_000  # characters: more is no message of grappe's
PLACES = 40  # ends of sentences at which a text is cut
ENDS = (". ", "; ", ": ", "\n", ", ")
NAMES = re.compile(r"\S+(?: or \S+)+")
THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")  # in French a comma is a decimal point
FEW = 8  # letters: a template with fewer resembles names that users choose, "step 3" say
FOREIGN = re.compile(
    r"\b(?:\w+(?:Error|Exception)|(?P<program>sbatch|squeue|srun|salloc|scancel|sacct|scontrol|sinfo|pip|cmake)): "
)
"""What others say: an exception to the text's end, a program of the system to the line's."""
MANY = 24  # letters: a template with fewer may resemble what others say
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
        templates = list[Template]()
        for english, other in self._texts.items():
            with contextlib.suppress(ValueError):  # an entry of a damaged file
                templates.append(Template.of(english, other))
        return templates


class _Message:
    """Translates one message: by the templates that have most of it in common, those of its values included."""

    def __init__(self, templates: list[Template], listing: str) -> None:
        self._templates = templates
        self._listing = listing
        self._found: dict[tuple[str, int], tuple[int, str]] = {}

    def best(self, text: str, depth: int, least: int = 0) -> tuple[int, str]:
        """Returns how many characters of a text are known, and its translation.

        Args:
            least: letters of a template that may be meant.
        """
        if THOUSANDS.fullmatch(text):
            return 0, text.replace(",", " ")
        if " " not in text.strip():
            return (0, text) if least else (self._by_one_template(text, depth, least) or (0, text))
        if depth > DEEPEST or len(self._found) > MOST:
            return 0, text
        if (text, least) not in self._found:
            self._found[text, least] = 0, text  # while it is looked for
            self._found[text, least] = (
                self._by_one_template(text, depth, least)
                or self._capital(text, depth, least)
                or self._sentences(text, depth)
                or self._around_foreign(text, depth)
                or (0, text)
            )
        return self._found[text, least]

    def _by_one_template(self, text: str, depth: int, least: int) -> tuple[int, str] | None:
        """The translation by one template; None: none is this text's."""
        candidates = []
        for template in self._templates:
            values = template.values(text) if template.letters >= least else None
            if values is not None and not _is_foreign(template, values):
                inside = self._inside(template, values, text, depth)
                weight = template.weight + sum(weight_inside for weight_inside, _ in inside)
                candidates.append((weight, template.filled([text for _, text in inside])))
        return max(candidates, key=lambda value: value[0]) if candidates else None

    def _inside(self, template: Template, values: list[str], text: str, depth: int) -> list[tuple[int, str]]:
        """The translations of a template's values; what others chose or say stays."""
        translations = []
        for place, (start, value) in enumerate(zip(template.starts(values), values, strict=True)):
            if place in template.kept or FOREIGN.fullmatch(text, _word(text, start), start):
                translations.append((0, value))
            else:
                translations.append(self.best(value, depth + 1, 0 if place in template.open else FEW))
        return translations

    def _capital(self, text: str, depth: int, least: int) -> tuple[int, str] | None:
        """The translation of a message that begins a sentence; None: there is none."""
        translation = (
            self._by_one_template(text[0].lower() + text[1:], depth, least) if text[:1].isupper() else None
        )
        return translation and (translation[0], translation[1][:1].upper() + translation[1][1:])

    def _list(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation of parts with commas between; None: one of them is not known."""
        parts = text.split(", ")
        if not 1 < len(parts) <= PLACES:
            return None
        translations = [
            translation
            for part in parts
            if (translation := self._by_one_template(part, depth + 1, 0)) is not None
        ]
        if len(translations) < len(parts):
            return None
        return sum(weight for weight, _ in translations), ", ".join(other for _, other in translations)

    def _around_foreign(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation of what stands before and behind what others say; None: nothing of theirs is in it."""
        mark = FOREIGN.search(text)
        if mark is None:
            return None
        end = text.find("\n", mark.end()) if mark["program"] else -1
        theirs, rest = (text[mark.start() :], "") if end < 0 else (text[mark.start() : end], text[end:])
        if not mark["program"]:
            theirs = self._with_remedy(theirs, depth)
        head = text[: mark.start()].removesuffix(": ")
        between = text[len(head) : mark.start()]
        weight, ours = self.best(head, depth + 1, FEW)
        more, behind = self.best(rest.lstrip(), depth + 1, FEW)
        return weight + more, f"{ours}{between}{theirs}{rest[: len(rest) - len(rest.lstrip())]}{behind}"

    def _with_remedy(self, text: str, depth: int) -> str:
        """Translates only a remedy of many letters at the end of what an exception says."""
        for place, end in _ends(text):
            remedy = (
                self._by_one_template(text[place + len(end) :], depth + 1, MANY)
                if end in (". ", "\n")
                else None
            )
            if remedy is not None:
                return f"{text[:place]}{end}{remedy[1]}"
        return text

    def _sentences(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation of a text's known sentences, or of a list; None: none is known before what others say."""
        if NAMES.fullmatch(text):
            return 0, text.replace(" or ", self._listing)
        mark = FOREIGN.search(text)
        if mark is None and (listed := self._list(text, depth)) is not None:
            return listed
        for place, end in _ends(text[: mark.start()] if mark else text):
            head, tail = text[:place], text[place + len(end) :]
            for sentence, other, is_head in ((tail, head, False), (head, tail, True)):
                translation = self._sentence(sentence, depth + 1) if " " in sentence else None
                if translation is not None:
                    more, rest = self.best(other, depth + 1, FEW)
                    parts = (translation[1], rest) if is_head else (rest, translation[1])
                    return translation[0] + more, end.join(parts)
        return None

    def _sentence(self, text: str, depth: int) -> tuple[int, str] | None:
        return self._by_one_template(text, depth, FEW) or self._capital(text, depth, FEW)


def _is_foreign(template: Template, values: Sequence[str]) -> bool:
    """Returns whether others' words stand before the template's first ones: then the sentence is theirs, too."""
    return bool(values) and not template.texts[0].strip() and FOREIGN.search(values[0]) is not None


def _word(text: str, end: int) -> int:
    """The begin of the word, and of its colon, that end at a place."""
    return text.rfind(" ", 0, max(end - 2, 0)) + 1


def read(language: str, encoding: str) -> Catalogue:
    """Returns a language's catalogue, its letters such as an encoding has; an empty one where its file is not whole."""
    try:
        texts = messages_of(Path(__file__).with_name(f"{language}.mo"))
    except Exception:  # of a file that is damaged anywhere: a translation is never worth a command
        texts = {}
    return Catalogue({english: encodable(other, encoding) for english, other in texts.items() if english})


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
    places = ((place, end) for end in ENDS for place in _places(text, end))
    return sorted(places)[:PLACES]


def _places(text: str, end: str) -> Iterable[int]:
    place = text.find(end)
    while place >= 0:
        yield place
        place = text.find(end, place + 1)
