"""The file of --out: refused before any work if it cannot be written, and written whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.cli import output
from grappe.cli.commands import app
from grappe.errors import UsageError

WRITES = """
import sys
from pathlib import Path
from grappe.cli import output
file = Path(sys.argv[1])
print("before")
output.check(file, ".json")
output.write_json(file, "times", plans=[1])
print("after")
"""


@pytest.mark.parametrize(
    "words", ["foresee digits", "measure digits", "lr-find digits", "verify digits -p replicate=2"]
)
def test_each_command_refuses_it_before_any_work(words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    for out, why in (("a.csv", "end in .json"), ("no/a.json", "no folder no"), ("folder.json", "it is a folder")):
        with pytest.raises(UsageError, match=f"--out={out}: .*{why}"):
            app([*words.split(), "--out", out], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("words", ["report a", "predict a test"])
def test_what_a_rename_would_replace_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match="--out=/dev/null: it is no regular file"):
        app([*words.split(), "--out", "/dev/null"], exit_on_error=False, print_error=False)


def test_a_folder_without_the_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *given: False)  # root may write anywhere
    with pytest.raises(UsageError, match="you may not write in"):
        output.check(tmp_path / "a.json")


def test_a_link_stays_a_link_and_what_was_there_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("long before\n" * 99)
    (tmp_path / "a.json").symlink_to("kept.json")
    output.write_json(tmp_path / "a.json", "times", seconds=float("nan"))
    assert (tmp_path / "a.json").is_symlink()
    written = json.loads((tmp_path / "kept.json").read_text())
    assert (written["kind"], written["seconds"]) == ("times", None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "kept.json"]


@pytest.mark.parametrize("name", ["/dev/stdout", "same.json"])
def test_the_standard_output_in_the_order_of_its_lines(name: str, tmp_path: Path) -> None:
    with (tmp_path / "same.json").open("w") as stream:
        subprocess.run([sys.executable, "-c", WRITES, name], stdout=stream, check=True, cwd=tmp_path)
    before, *lines, after = (tmp_path / "same.json").read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert json.loads("\n".join(lines))["plans"] == [1]


def test_a_pipe_is_written_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    output.check(tmp_path / "pipe", ".json")
    output.write(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
