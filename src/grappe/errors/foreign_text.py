"""Foreign text (names and values from files, logs, libraries) made fit to show: on a terminal, in CSV, HTML, a script.

A terminal obeys what it is sent: escape sequences change its title, clear it, or write to the clipboard. Other
characters hide text or turn it round. So each such character is shown as its escape (`\\x1b`), never sent.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

MOST = 2000  # characters of one foreign text: more would flood the screen
MOST_OF_LINES = 50_000
# Letters and marks by their category, but nothing is seen of them: fillers, variation selectors.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
COLOURS = re.compile(r"\x1b\[[0-9;:]{0,40}m")
# What begins a formula, in a cell or in what is a cell where another separator is usual; full-width forms as well.
FORMULA = re.compile(r"(^|[;,|])(\s*)(?=[=+\-@＝＋－＠])")


def printable(foreign: object, most: int = MOST) -> str:
    """One line of visible characters: every other character is written as its escape; cut after `most`."""
    text = _text(foreign)
    cut = ""
    if len(text) > most:
        text, cut = text[:most], f"… ({len(text) - most:,} more characters)"
    if text.isprintable() and not UNSEEN.search(text):
        return text + cut
    shown = (
        character
        if character.isprintable() and not UNSEEN.match(character)
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
    return "".join(shown) + cut


def printable_lines(foreign: object, most: int = MOST_OF_LINES) -> str:
    """Lines of visible characters: as `printable`, but line breaks and tabs stay, and colours are left out."""
    text = COLOURS.sub("", _text(foreign)).replace("\r\n", "\n").replace("\r", "\n")
    if len(text) > most:
        text = f"{text[: most // 2]}\n… ({len(text) - most:,} more characters)\n{text[-(most // 2) :]}"
    return "\n".join("\t".join(printable(part, most) for part in line.split("\t")) for line in text.split("\n"))


def html_text(foreign: object) -> str:
    """The text as HTML shows it, never markup."""
    return html.escape(printable(foreign))


def spreadsheet_cell(value: Any) -> Any:
    """A cell that a spreadsheet takes for text or a number, never for a formula; numbers stay numbers."""
    if value is None or isinstance(value, float) or (isinstance(value, int) and value == number(value)):
        return value
    if isinstance(value, list):
        text = " ".join(map(_text, value))
        if all(isinstance(item, int | float) for item in value):
            return text
    else:
        text = _text(value)
    return FORMULA.sub(r"\1'\2", printable(text))


def number(value: object) -> float:
    """The number that a file has in a place; 0 where it has something else there, or nothing finite."""
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return 0.0
    return float(value)


def entries(value: object) -> dict[str, Any]:
    """The dictionary that a file has in a place; {} where it has something else there."""
    return value if isinstance(value, dict) else {}


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the objects in JSON lines; skips a damaged line, such as the half of one whose writer was killed."""
    for line in lines:
        try:
            value = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _text(foreign: object) -> str:
    if isinstance(foreign, str):
        return foreign
    try:
        return str(foreign)
    except (RecursionError, ValueError):  # nested without end, or an integer of thousands of digits
        return "…"
