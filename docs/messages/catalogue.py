"""Reads, renews, checks and compiles a language's catalogue, a .po file for translators and a .mo file for grappe."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Mapping
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from grappe.language.catalogue import pieces

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "grappe" / "language"
EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)  # the same bytes whenever they are compiled
WIDEST = 79  # characters of a line of help that is broken by hand
FRENCH_SPACE = re.compile(r"^ (?=[:;])")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
HEADER = """\
# Help and messages of grappe, for translators. The words to use: CONTRIBUTING.md.
# Made by `python -m docs.messages`, which adds new messages, and compiles the catalogue.
#"""


def read(language: str) -> Catalog:
    """Returns the translations into a language."""
    file = FOLDER / f"{language}.po"
    if not file.exists():
        return Catalog(locale=language)
    with file.open("rb") as stream:
        return read_po(stream, locale=language)


def renewed(catalogue: Catalog, templates: Mapping[str, set[str]]) -> Catalog:
    """Returns a language's catalogue with the messages of now; a new one that resembles an old one is fuzzy.

    A message in which placeholders alone have other names, as variables were renamed, keeps its translation.
    """
    old = {_skeleton(str(message.id)): message for message in catalogue if message.id}
    for text in templates:
        if catalogue.get(text) is None and (message := old.get(_skeleton(text))):
            names = zip(PLACEHOLDER.findall(str(message.id)), PLACEHOLDER.findall(text), strict=True)
            catalogue.add(text, _with_names(str(message.string), dict(names)), flags=message.flags)
    made = Catalog()
    for text, files in sorted(templates.items(), key=lambda one: (sorted(one[1]), one[0])):
        made.add(text, locations=[(file, 0) for file in sorted(files)])
    catalogue.update(made)
    catalogue.obsolete.clear()
    return catalogue


def _skeleton(text: str) -> str:
    """Returns a message without the names of its placeholders; equal names stay equal."""
    numbers: dict[str, int] = {}
    return PLACEHOLDER.sub(lambda found: f"{{{numbers.setdefault(found[1], len(numbers))}}}", text)


def _with_names(text: str, names: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda found: f"{{{names[found[1]]}}}", text)


def write(catalogue: Catalog, language: str) -> None:
    """Writes a catalogue and compiles it."""
    (FOLDER / f"{language}.po").write_bytes(po(catalogue))
    (FOLDER / f"{language}.mo").write_bytes(mo(catalogue))


def po(catalogue: Catalog) -> bytes:
    """Returns a catalogue as a .po file, without line numbers and dates, which would change with every edit."""
    catalogue.header_comment = HEADER
    written = io.BytesIO()
    write_po(written, catalogue, width=110, include_lineno=False, omit_header=True)
    head = f'{HEADER}\nmsgid ""\nmsgstr ""\n"Language: {catalogue.locale}\\n"\n'
    head += '"Content-Type: text/plain; charset=utf-8\\n"\n'
    return head.encode() + b"\n" + written.getvalue()


def mo(catalogue: Catalog) -> bytes:
    """Returns a catalogue as a .mo file."""
    plain = Catalog(locale=catalogue.locale, creation_date=EPOCH, revision_date=EPOCH)
    for message in catalogue:
        if message.id and message.string and not message.fuzzy:
            plain.add(message.id, message.string)
    written = io.BytesIO()
    write_mo(written, plain)
    return written.getvalue()


def mistakes(catalogue: Catalog, templates: Mapping[str, set[str]]) -> list[str]:
    """Lists what keeps a catalogue from being whole: untranslated, unsure and stale entries, other placeholders."""
    found = [f"untranslated: {text!r}" for text in sorted(templates) if catalogue.get(text) is None]
    for message in catalogue:
        text, other = str(message.id), str(message.string)
        if not text:
            continue
        if text not in templates:
            found.append(f"stale, no such message any more: {text!r}")
        elif not other:
            found.append(f"untranslated: {text!r}")
        elif message.fuzzy:
            found.append(f"fuzzy, compare and remove the mark: {text!r}")
        elif problem := _wrong(text, other):
            found.append(f"{problem}: {text!r}")
    return found


def _wrong(text: str, other: str) -> str:
    """Names what is wrong with a translation's form; "" if nothing is."""
    try:
        theirs = {name for _, name in pieces(other) if name}
    except ValueError as error:
        return f"its braces do not fit ({error})"
    names = {name for _, name in pieces(text) if name}
    if theirs != names:
        return f"its placeholders are {sorted(theirs)}, not {sorted(names)}"
    unseen = {one for one in other if not one.isprintable() and one != "\n"}
    if unseen:
        return f"it has characters that terminals are not sent: {sorted(unseen)}"
    if _edges(text) != _edges(FRENCH_SPACE.sub("", other)):
        return "it begins or ends with other spaces"
    if "\n" in text and not names and max(map(len, other.split("\n"))) > max(WIDEST, *map(len, text.split("\n"))):
        return f"a line of it has more than {WIDEST} characters"
    return ""


def _edges(text: str) -> tuple[str, str]:
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
