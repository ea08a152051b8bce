"""Writes the README's generated parts, or with --check says which are not up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import parity

from grappe.verbs.catalogue import plan_markdown

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def files() -> str:
    """One line for every file of the package, from its own first line."""
    lines = ["| file | its one job |", "|---|---|"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/grappe/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in sorted(listed, key=lambda name: (name.count("/"), name)):
        path = ROOT / name
        if path.exists():
            words = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            lines.append(f"| [`{name.removeprefix('src/grappe/')}`]({name}) | {words} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """`text` with each part between `<!-- NAME -->` and `<!-- end -->` made anew."""
    for name, content in {
        "plan table": plan_markdown(),
        "parity": parity.markdown(),
        "files": files(),
    }.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"README.md has no part '{name}'"
        text = pattern.sub(lambda match, new=content: f"{match[1]}{new}\n{match[2]}", text)
    return text


def main() -> int:
    """Exit code 1 when --check finds the README out of date."""
    before = README.read_text()
    after = filled(before)
    if before == after:
        return 0
    if "--check" in sys.argv:
        print("README.md is not up to date: make docs")
        return 1
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
