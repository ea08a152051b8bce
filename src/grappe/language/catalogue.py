"""Translates English messages by the templates that they were made of: "no task 'x'" by "no task '{name}'"."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter

from grappe.private_api.gettext import messages_of

NAME = "| {} |"
"""The catalogue's entry for a name in a table: a message of one word could be the name of a field, or of a metric."""
DEEPEST = 6  # messages within messages
MOST = 500  # parts of one message that are looked at
PART_KNOWN = 0.3  # of the letters of a result
LONGEST = 20_000  # characters: more is no message of grappe's
PLACES = 40  # ends of sentences at which a text is cut
ENDS = (". ", "; ", ": ", "\n", ", ")
NAMES = re.compile(r"\S+(?: or \S+)+")
AMOUNT = r"±?\d[\d.,]*(?:e[+-]\d+)?%?(?: (?:[kMGT]B|m?s|W|J))?"
AMOUNTS = re.compile(rf"{AMOUNT}(?: (?:to )?{AMOUNT})?(?: \({AMOUNT} to {AMOUNT}\))?")
"""Measured values, ranges of them, a value with its uncertainty: 3,100 MB, 2 MB to 3 MB, 1 ms ±10%, 2 (1 to 3)."""
NUMBER = re.compile(
    r"(?P<kept>\[[^\]]*\]|`[^`]*`|(?:--[\w-]+|\b(?:torch|python|numpy|pandas|version|cuda|driver|glibc|nccl)) [\d.]+)"
    r"|(?<![^\s(])[-+±~]?(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?%?(?=[\s);:!?]|[.,](?:\s|$)|/s\b|$)",
    re.IGNORECASE,
)
"""A number in a sentence; or what has none: lists, options' values and versions, as they are typed."""
BYTES = re.compile(r"(?<= [kMGT])B")
NO_WORDS = re.compile(r"\S*[/=]\S*")
"""Paths and settings, which count neither as known nor as unknown."""
FEW = 8  # letters: a template with fewer resembles names that users choose, such as "step 3"
FOREIGN = re.compile(
    r"\b(?:\w+(?:Error|Exception)|(?P<program>sbatch|squeue|srun|salloc|scancel|sacct|scontrol|sinfo|pip|cmake)): "
)
"""Words of others: an exception to the text's end, a program of the system to the line's."""
MANY = 24  # letters: a template with fewer may resemble what others say
PLAIN = str.maketrans({"œ": "oe", "Œ": "OE", "…": "...", "’": "'", "«": '"', "»": '"', "×": "x"})


class Catalogue:
    """The translations into one language.

    Args:
        translations: by the English text; placeholders are names in braces.
    """

    def __init__(self, translations: Mapping[str, str]) -> None:
        self._texts = translations
        self._result = functools.lru_cache(1024)(self._translation)

    def text(self, english: str) -> str:
        """Returns the translation of a fixed text, such as help; the text itself without one."""
        return self._texts.get(english) or english

    def message(self, english: str) -> str:
        """Returns the translation of a message; what is not known in it stays as it is."""
        if len(english) > LONGEST:
            return english
        return self.numbers(_Message(self._templates, self.text).best(english, 0)[1])

    def result(self, english: str) -> str:
        """Returns the translation of a line or a cell of results, of which a part must be known: others wrote most."""
        return english if len(english) > LONGEST else self.numbers(self._result(english))

    def numbers(self, text: str) -> str:
        """Returns the text with a decimal comma and spaces in its numbers, up to what others say."""
        mark = FOREIGN.search(text)
        ours, theirs = (text, "") if mark is None else (text[: mark.start()], text[mark.start() :])
        return NUMBER.sub(_number, ours) + theirs

    def name(self, english: str) -> str:
        """Returns the translation of the name of a table's column or row."""
        other = self._texts.get(NAME.format(english), "").strip("| ")
        return other or (self.result(english) if " " in english else english)

    def _translation(self, english: str) -> str:
        message = _Message(self._templates, self.text)
        weight, other = message.heaviest(english)
        return other if weight >= PART_KNOWN * LETTER * sum(map(str.isalpha, NO_WORDS.sub("", english))) else english

    @functools.cached_property
    def _templates(self) -> list[Template]:
        templates = list[Template]()
        for english, other in self._texts.items():
            with contextlib.suppress(ValueError):  # an entry of a damaged file
                templates.append(Template(english, other))
        return templates


class _Message:
    """Translates one message by the templates that share most of it; templates of its values included."""

    def __init__(self, templates: list[Template], fixed: Callable[[str], str]) -> None:
        self._templates = templates
        self._fixed = fixed
        self._found: dict[tuple[str, int], tuple[int, str]] = {}

    def heaviest(self, text: str) -> tuple[int, str]:
        """Returns how much of a text is known, and its translation, by one template or by those of its sentences."""
        if " " not in text.strip():
            return self.best(text, 0)
        ways = self._by_one_template(text, 0, 0), self._capital(text, 0, 0), self._sentences(text, 0)
        return max((way for way in ways if way), key=lambda way: way[0], default=(0, text))

    def best(self, text: str, depth: int, least: int = 0) -> tuple[int, str]:
        """Returns how many characters of a text are known, and its translation.

        Args:
            least: letters of a template that may be meant.
        """
        if AMOUNTS.fullmatch(text):
            return self._amounts(text)
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
        if AMOUNTS.fullmatch(text):
            return self._amounts(text)
        candidates = []
        for template in self._templates:
            values = template.values(text) if template.letters >= least else None
            if values is None or (values and not template.texts[0].strip() and FOREIGN.search(values[0])):
                continue  # others' words stand before the template's first ones: the sentence is theirs, too
            inside = self._inside(template, values, text, depth)
            weight = template.weight + sum(weight_inside for weight_inside, _ in inside)
            candidates.append((weight, template.filled([text for _, text in inside])))
        return max(candidates, key=lambda value: value[0]) if candidates else None

    def _inside(self, template: Template, values: list[str], text: str, depth: int) -> list[tuple[int, str]]:
        """The translations of a template's values; what others chose or say stays."""
        translations = []
        for place, (start, value) in enumerate(zip(template.starts(values), values, strict=True)):
            word = text.rfind(" ", 0, max(start - 2, 0)) + 1  # the one, and its colon, that ends where the value begins
            if place in template.kept or FOREIGN.fullmatch(text, word, start):
                translations.append((0, value))
            else:
                translations.append(self.best(value, depth + 1, 0 if place in template.open else FEW))
        return translations

    def _capital(self, text: str, depth: int, least: int) -> tuple[int, str] | None:
        """The translation of a message that begins a sentence; None: there is none."""
        translation = self._by_one_template(text[0].lower() + text[1:], depth, least) if text[:1].isupper() else None
        return translation and (translation[0], translation[1][:1].upper() + translation[1][1:])

    def _list(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation of parts with commas between; None: one of them is not known."""
        parts = text.split(", ")
        if not 1 < len(parts) <= PLACES:
            return None
        translations = [
            translation for part in parts if (translation := self._by_one_template(part, depth + 1, 0)) is not None
        ]
        if len(translations) < len(parts):
            return None
        return sum(weight for weight, _ in translations), ", ".join(other for _, other in translations)

    def _around_foreign(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation of what stands before and after what others say; None: nothing of theirs is in it."""
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
        more, after = self.best(rest.lstrip(), depth + 1, FEW)
        return weight + more, f"{ours}{between}{theirs}{rest[: len(rest) - len(rest.lstrip())]}{after}"

    def _with_remedy(self, text: str, depth: int) -> str:
        """Translates only a remedy of many letters at the end of what an exception says."""
        for place, end in _ends(text):
            remedy = self._by_one_template(text[place + len(end) :], depth + 1, MANY) if end in (". ", "\n") else None
            if remedy is not None:
                return f"{text[:place]}{end}{remedy[1]}"
        return text

    def _sentences(self, text: str, depth: int) -> tuple[int, str] | None:
        """The translation of a text's known sentences, or of a list; None: none is known before what others say."""
        if NAMES.fullmatch(text):
            return 0, text.replace(" or ", self._fixed(" or "))
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

    def _amounts(self, text: str) -> tuple[int, str]:
        """The weight and the French form of AMOUNTS."""
        return sum(map(str.isalpha, text)) * LETTER, BYTES.sub("o", text.replace(" to ", self._fixed(" to ")))

    def _sentence(self, text: str, depth: int) -> tuple[int, str] | None:
        return self._by_one_template(text, depth, FEW) or self._capital(text, depth, FEW)


def _number(match: re.Match[str]) -> str:
    return match[0] if match["kept"] else match[0].replace(",", " ").replace(".", ",").replace("%", " %")


def read(language: str, encoding: str) -> Catalogue:
    """Returns a language's catalogue, its letters such as an encoding has; an empty one where its file is not whole."""
    try:
        texts = messages_of(Path(__file__).with_name(f"{language}.mo"))
    except Exception:  # of a file that is damaged anywhere: a translation is never worth a command
        texts = {}
    return Catalogue({english: encodable(other, encoding) for english, other in texts.items() if english})


def encodable(text: str, encoding: str) -> str:
    """Returns the text; without accents and ligatures where the encoding lacks one of its characters."""
    for form in (text, text.translate(PLAIN)):
        with contextlib.suppress(UnicodeEncodeError, LookupError):
            form.encode(encoding)
            return form
    return unicodedata.normalize("NFKD", text.translate(PLAIN)).encode("ascii", "ignore").decode()


def _ends(text: str) -> Iterable[tuple[int, str]]:
    """The first places where a sentence may end, and what ends it."""
    places = ((match.start(), end) for end in ENDS for match in re.finditer(re.escape(end), text))
    return sorted(places)[:PLACES]


LETTER = 16  # a letter's weight; a sign's is 1


class Template:
    """An English template and its translation."""

    def __init__(self, english: str, other: str) -> None:
        parts = pieces(english)
        self.texts = tuple(text for text, _ in parts)  # one before each placeholder, and one after the last
        self.names = tuple(name for _, name in parts if name is not None)
        # Places of placeholders: whose values are never translated, that have words of grappe's, that have one word.
        around = enumerate(itertools.pairwise(self.texts))
        self.kept = {place for place, (before, after) in around if is_kept(self.names[place], before, after)}
        self.open = {place for place, name in enumerate(self.names) if OPEN.fullmatch(name)}
        self.one_word = {place for place, name in enumerate(self.names) if ONE_WORD.fullmatch(name)}
        self.longest, fixed = max(self.texts, key=len), "".join(self.texts)
        # Of two templates that match, that with more fixed text is meant, letters before signs.
        self.weight = sum(LETTER if character.isalnum() else 1 for character in fixed)
        self.letters = sum(map(str.isalpha, fixed))
        self.other = pieces(other)

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
            names = self.names[:number]
            # One more of a name known before.
            earlier = values[names.index(self.names[number])] if self.names[number] in names else ""
            adjacent = earlier if not fixed and text.startswith(earlier, place) else ""
            there = _outside_brackets(text, fixed, place + len(adjacent), end)
            if there < 0:
                return None
            values.append(text[place:there])
            place = there + len(fixed)
        values.append(text[place:end])
        by_name = dict(zip(self.names, values, strict=True))
        if values != [by_name[name] for name in self.names] or any(" " in values[place] for place in self.one_word):
            return None
        return values

    def starts(self, values: Sequence[str]) -> list[int]:
        """Returns where the placeholders' values begin in the text that they were found in."""
        lengths = itertools.accumulate(len(text) + len(value) for text, value in zip(self.texts, values, strict=False))
        return [end - len(value) for end, value in zip(lengths, values, strict=True)]

    def filled(self, values: Sequence[str]) -> str:
        """Returns the translation with the placeholders' values."""
        by_name = dict(zip(self.names, values, strict=True))
        return "".join(text + (by_name.get(name, "") if name else "") for text, name in self.other)


def _outside_brackets(text: str, fixed: str, start: int, end: int) -> int:
    """The first place of a fixed text, rather one that does not cut a list such as [32, 1]; -1: there is none."""
    first = there = text.find(fixed, start, end)
    while there >= 0 and text.count("[", start, there) > text.count("]", start, there):
        there = text.find(fixed, there + 1, end)
    return first if there < 0 else there


def pieces(template: str) -> list[tuple[str, str | None]]:
    """Parses a template: each fixed text with the placeholder after it, the last without one.

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


CHOSEN = re.compile(
    r"(absolute|accounts?|base|command|cwd|data|entry|field|files?|folder|full_url|given|host|host_name|keys?|lines?|members?"
    r"|metric|module|names?|nodename|option|own_folder|parent|partition|paths?|pattern|quote|record|reference|root|runs?"
    r"|run_folder|scores?|site|source|split|task|typed|url|watcher)\d*"
)
"""Values that users, other programs or file systems chose: never translated."""
OPEN = re.compile(
    r"(advice|after|at|band|began|change|lead|choice|copied|count_of|described|difference|disk_advice|doing|end|ended|error|failure|forms?|found|get|hint|holds"
    r"|instead|job|kinds?|largest|message|mistake|more|most|nearest|needed|neighbours|note|of|others?|optimizer|own|parts?|place|plan|plan_name|problem|processes|read_status"
    r"|reasons?|remedy|rest|result|several|sizes|status|sentence|server|shapes|some|spoken|state|summary|text|there|title|torch|unit|unknown|verb|waiting|waits|what"
    r"|where|whose?|why|words?)\d*"
)
"""Words of grappe's, even as few as a name's: "step 3"."""
ONE_WORD = re.compile(r"(epoch|host|host_name|hours|index|nodename|number|pid|rank|score|seconds|seed|steps?)\d*")
"""Values of one word: numbers, and names of nodes."""
QUOTES = ("'", '"', "`")
TYPED = re.compile(r"(?:=|--[\w-]+[ =])$")
"""Text before a value that a user typed."""


def is_kept(name: str, before: str, after: str) -> bool:
    """Returns whether a placeholder's value is never translated.

    Args:
        before: the text before it; one that ends with a quotation mark, `=` or an option says that a name follows.
        after: the text after it.
    """
    quoted = before.endswith(QUOTES) and after.startswith(before[-1])
    typed = TYPED.search(before) is not None or after.startswith("=")
    return quoted or typed or CHOSEN.fullmatch(name) is not None
