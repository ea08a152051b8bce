"""Refuses names and files that make the source hard to read: `make lint` runs it; `--count` prints the figures alone.

- A variable, parameter, function or class must not have one of the names that say nothing (FORBIDDEN).
- A class's name stands once in the package, so that a search for it finds one thing.
- A small module that one other module imports belongs into that module, unless it is found by its file's name.
- No room and no extension has more lines than budget.toml allows it, and the sum of these numbers only falls:
  `python scripts/lint.py --budget` writes the numbers of the source that is there, where they are lower.
- The English guides have at most WORDS words without code and generated parts, and no paragraph of more than PARAGRAPH
  characters in a line.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "grappe"
DOCS = ROOT / "docs"
BUDGET = ROOT / "scripts" / "budget.toml"
FORBIDDEN = frozenset(["one", "found", "known", "told", "wanted", "given", "said", "mine", "whole", "much"])
WORDS, PARAGRAPH = 30_000, 300
NO_PROSE = re.compile(r"^(`{3,}).*?^\1|^<!-- [\w -]+ -->$.*?<!-- end -->", re.DOTALL | re.MULTILINE)
"""Code blocks and generated parts of a guide."""
SMALL = 120
"""Lines of a module from which on it may have a single importer."""
BY_NAME = (
    "tasks",
    "engines",
    "optimizers",
    "sites",
    "contrib/doctor/checks",
    "training/watchers",
    "private_api",
    "foresight/devices",
)
"""Folders whose files are found by their names."""
ALONE = {
    "slurm": "what a notebook imports",
    "__main__": "what `python -m grappe` runs",
    "contrib/lightning/offload": "what needs another extension, for plans that offload alone",
    "cli/help": "what loads rich, for translated help alone",
    "data/rand_like": "what a task calls as grappe.rand_like and grappe.randn_like",
}
"""Modules that may be small and have one importer, each with the reason."""


def main() -> int:
    """Prints what is refused; exit code 1 if anything is."""
    if "--budget" in sys.argv:
        write_budget()
        return 0
    gc.disable()  # which would look at half a million nodes again and again
    trees = {file: list(ast.walk(ast.parse(file.read_text()))) for file in sorted(PACKAGE.rglob("*.py"))}
    faults = {
        "names that say nothing": list(forbidden_names(trees)),
        "class names that stand more than once": list(doubled_classes(trees)),
        f"modules below {SMALL} lines with one importer": list(small_modules(trees)),
        "guides that are too long": list(long_guides({file.name: file.read_text() for file in DOCS.glob("*.md")})),
        "budgets of lines": list(over_budget(lines_of_rooms(), read_budget(BUDGET.read_text()), earlier_budget())),
    }
    for title, lines in faults.items():
        if lines or "--count" in sys.argv:
            print(f"{len(lines)} {title}" + ("" if "--count" in sys.argv else ":\n  " + "\n  ".join(lines)))
    return int(any(faults.values()))


def long_guides(guides: Mapping[str, str]) -> Iterator[str]:
    """Yields each line of a guide that is a long paragraph, and a sum of words that is too high."""
    prose = {name: NO_PROSE.sub("", text) for name, text in sorted(guides.items())}
    for name, text in prose.items():
        for line in text.splitlines():
            if len(line) > PARAGRAPH and not line.startswith("|"):
                yield f"docs/{name} has a paragraph of {len(line)} characters: {line[:60]}…"
    words = sum(len(text.split()) for text in prose.values())
    if words > WORDS:
        yield f"docs/*.md have {words:,} words, and may have {WORDS:,}: what a page drops is dropped, not moved"


def lines_of_rooms() -> Counter[str]:
    """Counts the lines of each room and of each extension, all of them, as `ruff format` leaves them."""
    lines = Counter[str]()
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).parts
        depth = 2 if parts[0] == "contrib" and len(parts) > 2 else 1
        lines["/".join(parts[:depth]) if len(parts) > 1 else "files of the root"] += len(file.read_text().splitlines())
    return lines


def read_budget(text: str) -> dict[str, int]:
    """Reads the numbers of lines by room."""
    return tomllib.loads(text).get("lines", {})


def earlier_budget() -> dict[str, int]:
    """Reads the budget of the last commit; {} where there is none, as in an unpacked archive."""
    command = ["git", "-C", str(ROOT), "show", f"HEAD:{BUDGET.relative_to(ROOT)}"]
    return read_budget(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def over_budget(lines: Mapping[str, int], budget: Mapping[str, int], before: Mapping[str, int]) -> Iterator[str]:
    """Yields the rooms that have more lines than they may, and a budget whose sum rises."""
    for room, count in sorted(lines.items()):
        if count > budget.get(room, 0):
            yield f"{room} has {count:,} lines, and may have {budget.get(room, 0):,} (scripts/budget.toml)"
    rise = sum(budget.values()) - sum(before.values())
    if before and rise > 0:
        yield f"scripts/budget.toml allows {rise:,} lines more than the last commit: lower another room's number"


def write_budget() -> None:
    """Lowers each number to the lines that are there; a new room gets its own, a room that went loses its number."""
    budget = read_budget(BUDGET.read_text()) if BUDGET.exists() else {}
    lines = {room: min(count, budget.get(room, count)) for room, count in sorted(lines_of_rooms().items())}
    shown = "".join(f'"{room}" = {count}\n' for room, count in lines.items())
    BUDGET.write_text(
        f"# Lines that each room and extension may have; `make lint` refuses more, or a higher sum.\n\n[lines]\n{shown}"
    )


def forbidden_names(trees: dict[Path, list[ast.AST]]) -> Iterator[str]:
    """Yields the place of each definition with a forbidden name."""
    for file, tree in trees.items():
        for node in tree:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            else:
                continue
            if name.strip("_").lower() in FORBIDDEN:
                line = getattr(node, "lineno", 0)
                yield f"{file.relative_to(ROOT)}:{line} {name}"


def doubled_classes(trees: dict[Path, list[ast.AST]]) -> Iterator[str]:
    """Yields each class name that stands in several places."""
    places = defaultdict(list)
    for file, tree in trees.items():
        for node in tree:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{name}: {', '.join(where)}"


def small_modules(trees: dict[Path, list[ast.AST]]) -> Iterator[str]:
    """Yields each small module with a single importer, and the importer."""
    names = {_module(file): file for file in trees}
    importers = defaultdict(set)
    for file, tree in trees.items():
        for target in _imported(tree, _module(file), names):
            importers[target].add(_module(file))
    for name, file in names.items():
        place = file.relative_to(PACKAGE).with_suffix("").as_posix()
        lines = len(file.read_text().splitlines())
        if file.name == "__init__.py" or place in ALONE or place.startswith(tuple(f"{folder}/" for folder in BY_NAME)):
            continue
        if place.startswith("verbs/") and (place.count("/") == 1 or file.stem == file.parent.name):
            continue  # a command's own
        if lines < SMALL and len(importers[name]) == 1:
            yield f"{place} ({lines} lines), imported by {importers[name].pop()}"


def _module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: list[ast.AST], name: str, names: dict[str, Path]) -> Iterator[str]:
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names and alias.name != name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in names else node.module
                if target in names and target != name:
                    yield target


if __name__ == "__main__":
    sys.exit(main())
