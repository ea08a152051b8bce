"""--json: one line with the three keys of its form, and nothing else on the standard output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.cli.exit import FORM, json_values, show_json

GUIDE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()


@pytest.mark.parametrize(
    ("words", "kind", "key"),
    [
        ("tasks digits", "tasks", "tasks"),
        ("engines", "engines", "keys"),
        ("sites narval", "sites", "sites"),
        ("gpus", "gpus", "gpus"),
        ("runs", "runs", "runs"),
        ("prune", "prune", "folders"),
    ],
)
def test_one_line_of_its_kind(
    words: str, kind: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    app([*words.split(), "--json"], exit_on_error=False, print_error=False)
    content = json.loads(capsys.readouterr().out)
    assert (content["form"], content["kind"]) == (FORM, kind)
    assert isinstance(content[key], list)


def test_what_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    show_json("scores", loss=float("nan"), folder=Path("a"), steps=(1, 2))
    content = json.loads(capsys.readouterr().out)
    assert (content["loss"], content["folder"], content["steps"]) == (None, "a", [1, 2])
    assert json_values({1: {float("inf")}}) == {"1": [None]}


def test_the_guide_names_each_command_that_has_the_option() -> None:
    commands = {
        name
        for name in app
        if not name.startswith("-")
        and name != "data"
        and any("--json" in argument.names for argument in app[name].assemble_argument_collection())
    }
    rows = "\n".join(line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `"))
    assert {name for name in commands if not re.search(rf"`{name}\b", rows)} == set()
