"""Turns the links of a Markdown page of the repository into links of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from docs.translations import BLOCK

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FRENCH = "docs/fr/"


def front_matter(*, listed: bool, searched: bool, source: str = "") -> str:
    """Returns what stands before a page: whether the sidebar lists and the search finds it, and its source file."""
    lines = ["orphan: true"] * (not listed) + ["nosearch: true"] * (not searched)
    lines += [f"source: {source}"] * bool(source)
    return "\n".join(["---", *lines, "---", ""]) if lines else ""


def site_page(path: str) -> str:
    """Returns the page of the site, without suffix, that shows a file or folder of the repository."""
    if path.startswith(FRENCH):
        name = path.removeprefix(FRENCH).removesuffix(".md")
        return f"fr/{'index' if name == 'README' else name}"
    if path == "README.md":
        return "index"
    if (ROOT / path).is_dir():
        return f"{path}/index"
    return path.removesuffix(".md")


def rewrite(text: str, page: str, target: Callable[[str], str]) -> str:
    """Replaces each link of a page to a file of the repository, outside of code blocks.

    Args:
        page: the page's path in the repository.
        target: what replaces the target of a link to a path in the repository.

    Raises:
        ValueError: a link leads out of the repository, or to what is not there.
    """
    parts, last = [], 0
    for fence in BLOCK.finditer(text):
        parts += [_rewritten(text[last : fence.start()], page, target), fence[0]]
        last = fence.end()
    return "".join([*parts, _rewritten(text[last:], page, target)])


def _rewritten(text: str, page: str, target: Callable[[str], str]) -> str:
    def replaced(found: re.Match[str]) -> str:
        image, words, address = found[1], found[2], found[3]
        path, hash_sign, anchor = address.partition("#")
        if not path or ":" in path:
            return found[0]
        there = os.path.normpath(PurePosixPath(page).parent / path)
        if not (ROOT / there).exists():
            raise ValueError(f"{page}: {address} is not there")
        if image:
            return found[0]
        made = f"{target(there)}{hash_sign}{anchor}"
        if ".html" in made:  # the other language's site: a page that this one's Sphinx does not know
            return f'<a href="{made}">{words}</a>'
        return f"[{words}]({made})"

    return LINK.sub(replaced, text)
