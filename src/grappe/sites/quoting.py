"""Quotes words for bash, but for the variables in them, which are expanded where the job runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from grappe.errors import UsageError

VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
OF_ONE_PROCESS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "RANK", "LOCAL_RANK")
EMPTY = "is empty on this node, and an argument of the job needs it"


def literal(word: str) -> str:
    """Quotes a word for bash."""
    return f"'{word}'" if "," in word and "'" not in word else shlex.quote(word)


def expanded(word: str) -> str:
    """Quotes a word for bash, except `$NAME` and `${NAME}`, which bash expands; an empty variable ends the shell.

    All else that bash would take for code stays text: `$(…)`, quotes, semicolons.
    """
    pieces, at = [], 0
    for match in VARIABLE.finditer(word):
        pieces += [literal(word[at : match.start()])] if match.start() > at else []
        pieces.append(f'"${{{match[1] or match[2]}:?{EMPTY}}}"')
        at = match.end()
    if at < len(word) or not pieces:
        pieces.append(literal(word[at:]))
    return "".join(pieces)


def command_words(words: Sequence[str]) -> Iterator[str]:
    """Yields the quoted words of a command of grappe; a plan keeps its variables, since each process expands them.

    Raises:
        UsageError: a variable is that of one process, and the shell is none.
    """
    before = ""
    for word in words:
        is_plan = before == "--plan" or word.startswith("--plan=")
        names = {match[1] or match[2] for match in VARIABLE.finditer(word)}
        if not is_plan and (wrong := sorted(names & {*OF_ONE_PROCESS})):
            raise UsageError(
                f"{word}: ${wrong[0]} is another for each process: only a script's arguments take it"
            )
        yield literal(word) if is_plan else expanded(word)
        before = word
