"""Wrong use of lr-find: refused with what to do, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.errors import GrappeError


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digits", "--steps", "3"], "--steps=3: it must be at least 20"),
        (["digits", "--seeds", "0"], "--seeds=0: it must be at least 1"),
        (["digits", "--lowest", "0"], "--lowest=0.0: a learning rate is above 0"),
        (["digits", "--lowest", "1", "--highest", "0.1"], "exchange them"),
        (["digits", "--plan", "replicate=two"], "replicate=two"),
        (["digitz"], "did you mean digits"),
        (["digits", "--out", "nowhere/lr.json"], "--out=nowhere/lr.json: there is no folder nowhere"),
        (["digits", "lr=0", "--plan", "threads=1"], "lr=0"),
    ],
)
def test_wrong_use(words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GrappeError) as refused:
        app(["lr-find", *words], exit_on_error=False, print_error=False)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_it_plots_and_writes_a_file_and_says_when_there_is_nothing_to_suggest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lr.json"
    words = ["lr-find", "digits", "lr=1e-6", "--steps", "20", "--seeds", "1", "--plan", "threads=1"]
    assert app([*words, "--out", str(out)], exit_on_error=False, print_error=False) == 1
    told = capfd.readouterr().out
    assert "no suggestion" in told
    assert "Give a larger --highest" in told
    assert "learning rate" in told
    assert json.loads(out.read_text())["band"] is None
