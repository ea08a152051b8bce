"""Names the French guides that have fallen behind their English ones: `python -m docs.translations`.

A French guide has its English one's code blocks, with comments in French. It begins with a mark, a hash of the English
text that it follows.
`python -m docs.translations --current task plans` marks guides as translated anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRENCH = ROOT / "docs" / "fr"
MARK = re.compile(r"\A<!-- follows (\S+) ([0-9a-f]{12}) -->\n")
GENERATED = re.compile(r"(<!-- [\w -]+ -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)

WORDS = re.compile(r"((^|\s+)# [^\n]*|^\s*\"{3}[^\n]*\"{3})$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
    """A French guide and the English one that it follows."""

    french: Path
    english: Path
    followed: str
    """Hash of the English text that was translated; "" without a mark."""

    @property
    def is_current(self) -> bool:
        """Says whether the English text is still the one that was translated."""
        return self.followed == digest(self.english.read_text())


def guides() -> list[Guide]:
    """Returns all French guides."""
    found = []
    for file in sorted(FRENCH.glob("*.md")):
        mark = MARK.match(file.read_text())
        found.append(Guide(french=file, english=english(file), followed=mark[2] if mark else ""))
    return found


def english(file: Path) -> Path:
    """Returns the guide that a French one translates."""
    return ROOT / file.name if file.name == "README.md" else ROOT / "docs" / file.name


def digest(text: str) -> str:
    """Hashes a guide without its generated parts, which change with the code."""
    return hashlib.sha256(GENERATED.sub(r"\1\2", text).encode()).hexdigest()[:12]


def blocks(text: str) -> list[str]:
    """Returns the code blocks of a guide."""
    return [found[0] for found in BLOCK.finditer(text)]


def code(text: str) -> list[str]:
    """Returns the code blocks of a guide without comments and docstrings of one line, which are translated."""
    return [WORDS.sub("", block) for block in blocks(text)]


def mark_current(file: Path) -> None:
    """Writes into a French guide that it follows the English text of now.

    Raises:
        ValueError: its code blocks are not those of the English guide.
    """
    text = MARK.sub("", file.read_text())
    source = english(file)
    if code(text) != code(source.read_text()):
        raise ValueError(f"{file.name}: its code blocks are not those of {source.relative_to(ROOT)}")
    name = source.relative_to(ROOT)
    file.write_text(f"<!-- follows {name} {digest(source.read_text())} -->\n{text}")


def main() -> int:
    """Exit code 1 when a guide has fallen behind."""
    if sys.argv[1:2] == ["--current"]:
        for name in sys.argv[2:]:
            mark_current(FRENCH / f"{name}.md")
        return 0
    behind = [guide for guide in guides() if not guide.is_current]
    for guide in behind:
        print(f"docs/fr/{guide.french.name} follows an older {guide.english.relative_to(ROOT)}")
    return int(bool(behind))


if __name__ == "__main__":
    sys.exit(main())
