"""Budgets: `make lint` refuses a room that grows, a sum that does, and guides that are too long."""

from scripts import lint

BUDGET = {"data": 100, "verbs": 50}


def test_a_room_stays_within_its_lines() -> None:
    assert not list(lint.over_budget({"data": 100, "verbs": 20}, BUDGET, BUDGET))
    assert list(lint.over_budget({"data": 101}, BUDGET, {})) == [
        "data has 101 lines, and may have 100 (scripts/budget.toml)"
    ]
    assert list(lint.over_budget({"new": 1}, BUDGET, {})) == ["new has 1 lines, and may have 0 (scripts/budget.toml)"]


def test_a_number_rises_only_as_another_falls() -> None:
    assert not list(lint.over_budget({}, {"data": 120, "verbs": 30}, BUDGET))
    (refused,) = lint.over_budget({}, {"data": 120, "verbs": 40}, BUDGET)
    assert "allows 10 lines more than the last commit" in refused


def test_extensions_are_counted_apart() -> None:
    lines = lint.lines_of_rooms()
    assert {"contrib", "contrib/deepspeed", "data", "files of the root"} <= set(lines)
    assert sum(lines.values()) == sum(len(file.read_text().splitlines()) for file in lint.PACKAGE.rglob("*.py"))


def test_guides_stay_short() -> None:
    words = "word " * 20 + "\n"
    code = "```\n" + "code " * 90 + "\n```\n<!-- table -->\n" + "generated " * 90 + "\n<!-- end -->\n"
    assert not list(lint.long_guides({"task.md": words * 1490 + code + "| a row |" + " cell |" * 90}))
    (many,) = lint.long_guides({"data.md": words, "task.md": words * 1500})
    assert "have 30,020 words, and may have 30,000" in many
    (long,) = lint.long_guides({"task.md": "word " * 61})
    assert long.startswith("docs/task.md has a paragraph of 305 characters")
