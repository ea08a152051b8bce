"""The commands that only tell, the help of all of them, and what nobody foresaw."""

import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App

from grappe import finder
from grappe.cli import application, commands
from grappe.cli import exit as end
from grappe.launch import local
from tests.commands import SLOW
from tests.typed import ended


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Returns a command's output on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        assert ended(*arguments) == 0
        told = capsys.readouterr()
        assert told.err == ""
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
        (["version"], ["."]),
        (["help", "runs"], ["Usage: grappe runs"]),
    ],
)
def test_what_there_is(output, command: list[str], words: list[str]) -> None:
    text = output(*command)
    assert all(word in text for word in words)


@pytest.mark.parametrize("command", ["", *(name for name in commands.app if not name.startswith("-"))])
def test_help_fits_80_columns(output, command: str) -> None:
    lines = output(*command.split(), "--help").splitlines()
    assert lines[0].startswith("Usage: grappe")
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
def test_a_command_that_trains_does_without_torch(tmp_path: Path) -> None:
    """The processes load torch; loading it twice at the same time would halve a busy machine's start."""
    code = (
        "import sys; from grappe.cli.commands import app\n"
        f"app(['train', 'digits', '--steps', '1', '--run', {str(tmp_path / 'run')!r}])\n"
        "sys.exit(bool({'torch', 'torchmetrics', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


@pytest.mark.parametrize("task", ["digits", SLOW])
def test_torchmetrics_is_imported_once_for_all_processes(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(local, "start_server", lambda *, metrics: asked.append(metrics))
    application.preflight(["replicate=2"], task)
    assert asked == [task == "digits"]


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        *(("digits", True), ("digits:Digits", True), ("some.module:Task", True)),
        *(("plain.py", False), ("own.py:A", True), ("derived.py", True)),
    ],
)
def test_which_tasks_may_import_a_module(tmp_path: Path, monkeypatch, reference: str, found: bool) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("import torch\n")
    Path("own.py").write_text("from torchmetrics.text import Perplexity\n")
    Path("derived.py").write_text("from grappe.tasks.digits import Digits\n")
    assert finder.mentions(reference, "torchmetrics") is found


def test_what_nobody_foresaw_is_called_a_bug(capsys: pytest.CaptureFixture) -> None:
    """The words that all attacks and fuzzers search for."""
    app = App()

    @app.default
    def fails() -> None:
        raise ZeroDivisionError("unforeseen")

    with pytest.raises(SystemExit) as ended:
        end.run(app, [])
    assert ended.value.code == 1
    assert f"ZeroDivisionError: unforeseen ({end.BUG}" in capsys.readouterr().err
