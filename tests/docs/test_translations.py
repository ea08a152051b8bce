"""The French guides: the code blocks of the English ones, which the tests run; those that fell behind are named."""

import dataclasses
import re
from pathlib import Path

import pytest
from docs import translations

from grappe.plan import Plan
from tests.docs.test_blocks import LISTS

GUIDES = translations.guides()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.french.name)
def test_code_blocks_are_those_of_the_english_guide(guide: translations.Guide) -> None:
    assert guide.followed, "no mark: python -m docs.translations --current NAME"
    assert translations.code(guide.french.read_text()) == translations.code(guide.english.read_text())


def test_a_guide_that_fell_behind_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "docs" / "fr").mkdir(parents=True)
    (tmp_path / "docs" / "plans.md").write_text("# Plans\n\n```\na\n```\n")
    french = tmp_path / "docs" / "fr" / "plans.md"
    french.write_text("# Les plans\n\n```\na\n```\n")
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "FRENCH", french.parent)
    monkeypatch.setattr("sys.argv", ["translations"])
    translations.mark_current(french)
    assert translations.main() == 0
    (tmp_path / "docs" / "plans.md").write_text("# Plans\n\n```\nb\n```\n")
    assert translations.main() == 1
    assert "docs/fr/plans.md follows an older docs/plans.md" in capsys.readouterr().out
    with pytest.raises(ValueError, match="code blocks"):
        translations.mark_current(french)


@pytest.mark.parametrize("name", ["x", "plan keys", "foreseen-time"])
def test_generated_parts_make_no_guide_old(name: str) -> None:
    one, other = (f"a\n<!-- {name} -->\n{part}\n<!-- end -->" for part in (1, 2))
    assert translations.digest(one) == translations.digest(other)


def test_the_french_table_has_all_keys_and_their_defaults() -> None:
    text = (translations.FRENCH / "plans.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w]+) \|", text, re.MULTILINE))
    defaults = {
        field.name: "auto" if field.default is None else str(field.default).lower()
        for field in dataclasses.fields(Plan)
        if field.name != "engine"
    }
    assert rows == defaults


def test_every_guide_has_a_french_one() -> None:
    english = {one.name for one in (translations.ROOT / "docs").glob("*.md")}
    assert english - {one.name for one in translations.FRENCH.glob("*.md")} == set(LISTS)


def test_the_french_gallery_has_every_task() -> None:
    text = (translations.FRENCH / "gallery.md").read_text()
    tasks = [one for one in (translations.ROOT / "examples" / "gallery").glob("*.*") if one.suffix in (".py", ".ipynb")]
    assert tasks
    assert [one.name for one in tasks if f"../../examples/gallery/{one.name})" not in text] == []
