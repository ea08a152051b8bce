"""Names and values from a run that somebody sent: whatever a command prints of them, no terminal obeys."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.cli.exit import BUG
from grappe.training.run import Run
from tests.typed import ended

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e[red]\u200b\U000e0041\x9b31m"
FORMULA = "=HYPERLINK(1)"
Said = Callable[..., str]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Said:
    """Runs a command; all that it wrote, if any terminal can show it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*arguments: str) -> str:
        ended(*arguments)
        text = "".join(capfd.readouterr())
        assert text.replace("\n", "").isprintable(), ascii(text)
        assert BUG not in text
        assert text
        return text

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / f"run{ESCAPES}"
    described = dict.fromkeys(("task", "plan", "status", "host"), ESCAPES)
    described |= {key: {ESCAPES: ESCAPES} for key in ("fields", "versions")}
    Run.begin(folder, {**described, "changes": [ESCAPES], "used": {"joules": {ESCAPES: 1}}})
    (folder / "checkpoints/step-000001").mkdir()
    (folder / "checkpoints/step-000001/manifest.json").write_text(json.dumps({"files": {ESCAPES: 1}}))
    (folder / "logs/rank-0.log").write_text(f"a line\n{ESCAPES}\n")
    lines = [
        {"kind": "step", "step": 1, "loss": ESCAPES, FORMULA: FORMULA, "a": "\t=1", "b": "-1+1"},
        {"kind": "evaluation", "step": 1, "samples": 2, ESCAPES: 0.5, "text": ESCAPES, "@sum": ["+1", 2]},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("command", ["runs", "curves", "logs", "evaluate", "prune", "report", "train", "follow"])
def test_a_run(run: Path, said: Said, command: str) -> None:
    if command == "follow":
        (run / "done").touch()
    text = said(*{"train": ("train", "digits", "--run")}.get(command, (command,)), str(run))
    if command in ("follow", "runs"):
        assert r"\x1b]0;owned\x07" in (text if command == "follow" else said("runs"))
    if command == "report":
        page = (run / "report.html").read_text()
        assert page.replace("\n", "").isprintable()
        assert json.dumps("\\x1b]0;owned")[1:-1] in page


def test_curves_hold_no_formula(run: Path, said: Said) -> None:
    rows = list(csv.reader(io.StringIO(said("curves", str(run)))))
    assert len(rows) == 3
    assert [cell for row in rows for cell in row if cell[:1] in list("=+-@\t\r")] == []
    assert "'" + FORMULA in rows[0]
    assert "'" + FORMULA in rows[1]
    assert "'-1+1" in rows[1]
    assert "'+1 2" in rows[2]


def test_words_of_the_command_line_come_back_visible(said: Said) -> None:
    for words in (("train", ESCAPES), ("evaluate", ESCAPES), ("sites", ESCAPES), (ESCAPES,)):
        assert r"\x1b]0;owned\x07" in said(*words)
    for words in (("train", "digits", "--plan", ESCAPES), ("train", "digits", f"{ESCAPES}=1")):
        said(*words)


def test_a_name_that_is_no_text(said: Said) -> None:
    assert r"runs/\udcff" in said("runs", "runs/\udcff")
