"""Executes the labs and stores what they print in them: `python -m docs.labs [NAME ...]`; --check names the outdated.

A lab is outdated when its code has changed since it was executed. When words that grappe shows have changed, its page
says so.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LABS = sorted((ROOT / "labs").glob("*.ipynb"))
SHOWN = (
    "training/reporting.py",
    "training/watchers/console.py",
    "contrib/tune/tune.py",
    "contrib/lab/lr_find.py",
    "notebook.py",
)
"""Where the words are that the labs show most, in the package."""
HEADING = re.compile(r"^(## Solution[^\n]*)\n*", re.MULTILINE)


def code_hash(book: dict[str, Any]) -> str:
    """Hashes a notebook's code."""
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    return _digest("\0".join(cells))


@functools.cache
def words_hash() -> str:
    """Hashes the strings that grappe shows in a lab."""
    texts = []
    for place in SHOWN:
        path = ROOT / "src" / "grappe" / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path] * path.exists():
            tree = ast.parse(file.read_text())
            docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings]
            texts += sorted(node.value for node in nodes if isinstance(node.value, str))
    return _digest("\0".join(texts))


def outdated(book: dict[str, Any]) -> str:
    """Returns what has changed since a notebook was executed: "code", "words" or ""."""
    executed = book["metadata"].get("grappe", {})
    if executed.get("code") != code_hash(book):
        return "code"
    return "" if executed.get("words") == words_hash() else "words"


def execute(file: Path) -> None:
    """Executes a notebook in a folder of its own, and stores the outputs in it."""
    import nbclient
    import nbformat

    os.environ["GRAPPE_LANG"] = "en"
    text = json.dumps(_solutions_folded(json.loads(file.read_text())))
    content = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(content, timeout=1200, kernel_name="python3", resources=resources).execute()
        book = json.loads(nbformat.writes(content))
        for cell in book["cells"]:
            cell["metadata"].pop("execution", None)
            if cell["cell_type"] == "code":
                cell["outputs"] = [_cleaned(output, folder) for output in _joined(cell["outputs"])]
    book["metadata"] = {
        **{key: book["metadata"][key] for key in ("kernelspec",) if key in book["metadata"]},
        "language_info": {"name": "python"},
        "grappe": {"code": code_hash(book), "words": words_hash()},
    }
    file.write_text(json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def parts(text: str) -> list[str]:
    """Splits the text of a cell before and after each heading of a solution."""
    return [part.strip("\n") for part in HEADING.split(text) if part.strip()]


def _solutions_folded(book: dict[str, Any]) -> dict[str, Any]:
    """Gives each heading of a solution a cell of its own, which JupyterLab shows folded."""
    cells = []
    for cell in book["cells"]:
        if cell["cell_type"] != "markdown":
            cells.append(cell)
            continue
        for number, text in enumerate(parts("".join(cell["source"]))):
            metadata = {"jp-MarkdownHeadingCollapsed": True} if HEADING.match(text) else {}
            name = f"{cell['id']}-{number}" if number else cell["id"]
            cells.append({**cell, "id": name, "metadata": metadata, "source": text.splitlines(keepends=True)})
    return {**book, "cells": cells}


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins what was written to one stream without a pause; the kernel cuts it anywhere.

    What is written to the standard error is left out: warnings of libraries, with paths of the machine.
    """
    outputs = [output for output in outputs if output.get("name") != "stderr"]
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if joined and "text" in output and output.get("name") == joined[-1].get("name"):
            joined[-1]["text"] = [*joined[-1]["text"], *output["text"]]
        else:
            joined.append(output)
    return joined


def _cleaned(output: dict[str, Any], folder: str) -> dict[str, Any]:
    """An output as a terminal leaves it, without this machine's names."""
    if "text" in output:
        return {**output, "text": _lines(output["text"], folder)}
    texts = {kind: _lines(text, folder) for kind, text in output.get("data", {}).items() if kind.startswith("text/")}
    return {**output, "data": {**output["data"], **texts}} if texts else output


def _lines(text: str | list[str], folder: str) -> list[str]:
    lines = [line.rstrip(" ").rpartition("\r")[2] for line in "".join(text).split("\n")]
    shown = "\n".join(lines).replace(f"{folder}/", "").replace(folder, ".")
    shown = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node", shown.replace(str(Path.home()), "~"))
    return shown.splitlines(keepends=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> int:
    """Exit code 1 when a lab fails, or --check finds one whose code has changed."""
    names = [name for name in sys.argv[1:] if name != "--check"]
    files = [file for file in LABS if not names or any(name in file.stem for name in names)]
    if "--check" not in sys.argv:
        from nbclient.exceptions import CellExecutionError

        failed = 0
        for file in files:
            print(f"executing {file.relative_to(ROOT)}", flush=True)
            try:
                execute(file)
            except CellExecutionError as error:  # a lab that measures fails on a busy machine: the others go on
                print(error, file=sys.stderr)
                failed = 1
        return failed
    changed = {file: outdated(json.loads(file.read_text())) for file in files}
    for file, what in changed.items():
        if what:
            print(f"{file.relative_to(ROOT)}: the {what} changed since it was executed: make labs")
    return int("code" in changed.values())


if __name__ == "__main__":
    sys.exit(main())
