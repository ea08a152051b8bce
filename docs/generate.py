"""Writes the generated parts of the README and the guides, or with --check says which are not up to date."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from grappe.plan import Plan
from grappe.verbs.catalogue import plan_markdown

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "grappe"


def rooms() -> str:
    """A line for every entry of the package's root: the first line of its docstring."""
    lines = ["| room | its one job |", "|---|---|"]
    folders = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    files = sorted(PACKAGE.glob("*.py"))
    for path in [*folders, *files]:
        source = path / "__init__.py" if path.is_dir() else path
        job = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
        name = path.name + "/" * path.is_dir()
        lines.append(f"| [`{name}`]({path.relative_to(ROOT)}) | {job} |")
    return "\n".join(lines)


def parity() -> str:
    """A line for every plan of docs/parity.json, which `python -m tests.parity.table` measures."""
    lines = ["| engine | plan | largest difference |", "|---|---|---|"]
    for text, gap in json.loads((ROOT / "docs" / "parity.json").read_text())["gaps"].items():
        engine = Plan.parse(text).engine
        lines.append(f"| {engine} | `{text.removeprefix(f'engine={engine},')}` | {gap:.0e} |")
    return "\n".join(lines)


def optimizers() -> str:
    """A line for every plan, a column for every optimizer of grappe's."""
    found = json.loads((ROOT / "docs" / "parity.json").read_text())["optimizers"]
    lines = [f"| plan | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for text in next(iter(found.values())):
        gaps = [gaps[text] for gaps in found.values()]
        cells = " | ".join("refused" if gap is None else f"{gap:.0e}" for gap in gaps)
        lines.append(f"| `{text}` | {cells} |")
    return "\n".join(lines)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "README.md": ("rooms", rooms),
    "docs/plans.md": ("plan keys", plan_markdown),
    "docs/parity.md": ("parity", parity),
    "docs/optimizers.md": ("optimizers", optimizers),
}
"""By page: the name of its generated part, which stands between `<!-- NAME -->` and `<!-- end -->`, and its text."""


def renewed(page: str) -> str:
    """The page's text, its generated part made anew."""
    name, make = PARTS[page]
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = (ROOT / page).read_text()
    assert pattern.search(text), f"{page} has no part '{name}'"
    return pattern.sub(lambda match: f"{match[1]}{make()}\n{match[2]}", text)


def main() -> int:
    """Exit code 1 when --check finds a page out of date."""
    stale = {page: text for page in PARTS if (text := renewed(page)) != (ROOT / page).read_text()}
    if "--check" in sys.argv:
        for page in stale:
            print(f"{page} is not up to date: make docs")
        return int(bool(stale))
    for page, text in stale.items():
        (ROOT / page).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
