"""Every code block of every guide, in both languages: run, its commands parsed, or named in blocks.toml with why not.

Commands are parsed, not run: most of them train for minutes, and the tests of their verbs run them on less.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from docs import translations

from grappe.cli.commands import app
from tests.docs.test_pieces import HERE, first, opened

ROOT = translations.ROOT
LISTS = (
    "accuracy.md",
    "api.md",
    "benchmarks.md",
    "bottlenecks.md",
    "gallery-parity.md",
    "gpu-evidence.md",
    "json.md",
    "log.md",
    "memory-of-plans.md",
    "soak.md",
    "step.md",
)
"""Pages of names, of figures or for developers, which are no guides, and stay English."""
GUIDES = [ROOT / "README.md", *(one for one in sorted((ROOT / "docs").glob("*.md")) if one.name not in LISTS)]
SKILL = ROOT / "skills" / "grappe" / "SKILL.md"
PAGES = [*GUIDES, SKILL, *sorted(translations.FRENCH.glob("*.md"))]

TABLE = tomllib.loads(Path(__file__).with_name("blocks.toml").read_text())
RUN_ELSEWHERE = TABLE["elsewhere"]
NOT_RUN = [(each["guide"], each["start"]) for each in TABLE["not_run"]]
OUTPUT = [(guide, start) for guide, starts in TABLE["output"].items() for start in starts]


def commands(text: str) -> list[str]:
    """The commands of grappe in a block of the shell, without comments; not those that leave words out ("…")."""
    lines = [line.partition("  #")[0].partition(" | head")[0] for line in text.splitlines()]
    found = [line[at.end() :] for line in lines for at in re.finditer(r"^(?:\$ |.* [|&]+ )?(?=grappe )", line)]
    return [one for one in found if "…" not in re.split(r"\s+", one)]


def marked(page: str, text: str) -> bool:
    """Whether the block stands in one of the lists above."""
    return any(page == name and text.lstrip().startswith(start) for name, start in [*NOT_RUN, *OUTPUT])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_parsed_or_marked(page: Path) -> None:
    for block in translations.blocks(page.read_text()):
        language, text = opened(block)
        known = commands(text)
        for command in known:
            app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
        if page.parent == translations.FRENCH:
            continue  # its code is the English one's: tests/docs/test_translations.py
        runs = (page.name, first(text)) in HERE or (language == "python" and page.name in RUN_ELSEWHERE)
        shell = known or re.search(r"^(grappe .*…|make |pip install )", text, re.MULTILINE)
        assert runs or marked(page.name, text) or (not language and shell), (
            f"{page.name}: no test runs this block. Run it in a test, or say why not in blocks.toml:\n{text}"
        )


@pytest.mark.parametrize(("guide", "test"), RUN_ELSEWHERE.items())
def test_the_named_test_reads_the_guide(guide: str, test: str) -> None:
    assert guide in (ROOT / test).read_text()


@pytest.mark.parametrize(("guide", "start"), [*NOT_RUN, *OUTPUT])
def test_nothing_is_marked_that_is_gone(guide: str, start: str) -> None:
    texts = [opened(block)[1].lstrip() for block in translations.blocks((ROOT / "docs" / guide).read_text())]
    assert any(text.startswith(start) for text in texts)
