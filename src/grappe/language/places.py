"""Tells a message's placeholders apart by their names: what others chose, words of grappe's, single words."""

from __future__ import annotations

import re

NAMES = re.compile(
    r"(absolute|accounts?|base|command|cwd|data|entry|field|files?|folder|full_url|given|host|host_name|keys?|lines?|members?"
    r"|metric|module|names?|nodename|option|own_folder|parent|partition|paths?|pattern|quote|record|reference|root|runs?"
    r"|run_folder|scores|site|source|split|task|typed|url|watcher)\d*"
)
"""Values that users, other programs or file systems chose: never translated."""
OPEN = re.compile(
    r"(advice|after|at|band|began|behind|beside|choice|described|difference|disk_advice|doing|end|ended|error|failure|forms?|found|get|hint|holds"
    r"|instead|job|kinds?|largest|message|mistake|more|most|nearest|needed|note|of|others?|own|part|place|plan|problem|processes"
    r"|reasons?|remedy|rest|result|sentence|server|shapes|some|spoken|state|summary|text|there|title|torch|unit|unknown|verb|waiting|waits|what"
    r"|where|whose?|why|words?)\d*"
)
"""Words of grappe's, be they as few as those of a name: "step 3"."""
ONE_WORD = re.compile(r"(epoch|host|host_name|hours|index|nodename|number|pid|rank|seconds|seed|steps?)\d*")
"""Values of one word: numbers, and names of nodes."""
QUOTES = ("'", '"', "`")
TYPED = re.compile(r"(?:=|--[\w-]+[ =])$")
"""What stands before a value that a user typed."""


def is_kept(name: str, before: str, behind: str) -> bool:
    """Returns whether a placeholder's value is never translated.

    Args:
        before: the text before it; one that ends with a quotation mark, `=` or an option says that a name follows.
        behind: the text behind it.
    """
    quoted = before.endswith(QUOTES) and behind.startswith(before[-1])
    typed = TYPED.search(before) is not None or behind.startswith("=")
    return quoted or typed or NAMES.fullmatch(name) is not None
