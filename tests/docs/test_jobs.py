"""The pages of docs/guides.md's jobs: two clicks from the README, of at most 60 lines, a command first."""

import re
from pathlib import Path

import pytest
from docs import translations
from docs.site.assemble import jobs

DOCS = translations.ROOT / "docs"
MOST_LINES = 60


def test_the_guides_list_twenty_jobs() -> None:
    assert len(set(jobs())) == 19, "the twentieth, inference, is answered there"
    assert "vLLM" in (DOCS / "guides.md").read_text()


@pytest.mark.parametrize("folder", [DOCS, translations.FRENCH], ids=["en", "fr"])
def test_the_readme_leads_to_the_list_which_has_them_all(folder: Path) -> None:
    readme = (translations.ROOT if folder == DOCS else folder) / "README.md"
    assert re.search(r"\]\((docs/)?guides\.md\)", readme.read_text())
    listed = (folder / "guides.md").read_text()
    assert [page for page in jobs() if f"]({page}.md)" not in listed] == []


@pytest.mark.parametrize("page", jobs())
def test_a_page_has_a_command_and_what_goes_wrong(page: str) -> None:
    for folder, title in ((DOCS, "## What goes wrong"), (translations.FRENCH, "## Ce qui ne va pas")):
        text = translations.MARK.sub("", (folder / f"{page}.md").read_text())
        assert len(text.splitlines()) <= MOST_LINES
        before, _, rest = text.partition("```")
        assert "\n## " not in before and "\n|" not in before, "the command comes first"
        assert title in rest.splitlines()
