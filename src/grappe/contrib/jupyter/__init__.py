"""Adds the cell magic %%grappe to IPython: it writes a cell with a Task to a file, and runs a command on that file."""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from grappe.cli.commands import app
from grappe.cli.exit import execute, typed
from grappe.errors import GrappeError, UsageError, of_file
from grappe.errors.foreign_text import printable_lines
from grappe.language import translated
from grappe.plan import ONE_PROCESS, STRATEGIES, Plan

COMMANDS = ("train", "verify", "foresee")
"""Commands that take a task, its fields and a plan; `submit` submits them."""
KEYS = frozenset({*Plan.__dataclass_fields__, *STRATEGIES, ONE_PROCESS})
HEADER = "# A cell of a notebook, written by %%grappe: once the cell is edited, it becomes another file.\n"
"""First line of a cell's file, in place of the magic's, so that line numbers are those of the cell."""


class CellError(Exception):
    """Error of a command in a cell, of which IPython shows the message alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(translated(printable_lines(f"grappe: {self}"), sys.stderr))]


def load_ipython_extension(shell: Any) -> None:
    """Adds the magic to a shell of IPython: `%load_ext grappe.contrib.jupyter` calls it."""
    shell.register_magic_function(run_cell, "cell", "grappe")


def run_cell(line: str, cell: str) -> None:
    """Runs the command in `line`, as in a terminal, on the cell's task: `%%grappe train replicate=2 epochs=3`.

    Raises:
        CellError: the request is wrong, or the command failed; the message says what to do.
    """
    try:
        words = command_of(line, cell)
        with typed(words):
            execute(app, words)
    except GrappeError as error:
        raise CellError(error) from None
    except KeyboardInterrupt:
        raise CellError("ended at once; earlier checkpoints are kept") from None


def command_of(line: str, cell: str) -> list[str]:
    """Writes the cell to a file of the working folder; returns the words of the command, as in a terminal.

    Bare words behind the command are keys of the plan and the task's fields; options follow. With --plan all bare words
    are fields, as in a terminal.

    Raises:
        UsageError: the line or the cell is wrong, or the file cannot be written.
    """
    try:
        words, options = _apart(shlex.split(line), "-")
    except ValueError as error:
        raise UsageError(f"%%grappe {line}: {error}") from None
    before, bare = list[str](), words[1:]
    if words[:1] == ["submit"]:
        before, inner = _apart(options, "-- ")
        words, options = _apart(inner[1:] or ["train"], "-")
        before, bare = ["submit", *before, "--"], [*bare, *words[1:]]
    command = words[0] if words else "COMMAND"
    if command not in COMMANDS:
        raise UsageError(f"%%grappe takes {', '.join(COMMANDS)} or submit first. For others: !grappe {command}")
    try:
        tree = ast.parse(cell)
    except SyntaxError as error:
        where = f"line {(error.lineno or 0) + 1} of the cell"
        raise UsageError(f"{where}: {error.msg}. The cell becomes a file, without lines of % or !") from None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not any(word.startswith(("--plan", "-p")) for word in options):
        keys = [word for word in bare if re.split("[=,]", word)[0] in KEYS]
        bare = [word for word in bare if word not in keys]
        fields = {ast.unparse(line.target) for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}
        for name in fields.intersection(re.split("[=,]", ",".join(keys))):
            raise UsageError(f"{name} is a key of plans and a field of the cell's task: give the plan by --plan")
        options += ["--plan", ",".join(keys)] if keys else []
    return [*before, command, str(_written(cell, classes[-1].name if classes else "cell")), *bare, *options]


def _apart(words: list[str], begin: str) -> tuple[list[str], list[str]]:
    """Parts words before the first that begins with `begin`; "-- " is a word of its own."""
    place = next((place for place, word in enumerate(words) if f"{word} ".startswith(begin)), len(words))
    return words[:place], words[place:]


def _written(cell: str, name: str) -> Path:
    """Writes the cell to a file whose name has a hash of the text, so that an earlier run keeps its own."""
    text = HEADER + cell
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    file = Path(f"{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}_{digest}.py")
    try:
        if not file.exists():
            file.write_text(text, encoding="utf-8")
        elif file.read_text(encoding="utf-8", errors="replace") != text:
            raise UsageError(f"{file} was edited since %%grappe wrote it: rename it, or train it from there")
    except OSError as error:
        raise of_file(error) from None
    return file
