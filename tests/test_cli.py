"""The commands that only tell, and the help of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe import cli


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What a command prints on an ordinary terminal's 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["grappe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        assert (end.value.code, told.err) == (0, "")
        return told.out

    return run


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["engines"], ["replicate", "native", "textbook"]),
        (["tasks"], ["digits", "cifar10", "LeNet"]),
        (["tasks", "digits"], ["handwritten digits", "batch_size"]),
        (["runs"], ["no run in runs: grappe train digits makes one"]),
        (["--version"], ["."]),
    ],
)
def test_what_there_is(output, command: list[str], words: list[str]) -> None:
    text = output(*command)
    assert all(word in text for word in words)


@pytest.mark.parametrize("command", ["", *(name for name in cli.app if not name.startswith("-"))])
def test_help_fits_80_columns(output, command: str) -> None:
    lines = output(*command.split(), "--help").splitlines()
    assert lines[0].startswith("Usage: grappe")
    assert max(map(len, lines)) <= 80


def test_nothing_of_the_introduction_is_wrapped(output) -> None:
    assert cli.HELP.strip() in output("--help")
