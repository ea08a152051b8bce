"""Outputs of commands: the file of --out is refused if it cannot be written, and is written whole."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.cli import output
from grappe.contrib.tune.space import Trial
from grappe.contrib.tune.study import make_study
from grappe.errors import UsageError
from grappe.training.run import Run
from grappe.verbs.runs import describe
from tests.contrib.tune.test_study import SEARCH, filled
from tests.training.test_training import train
from tests.typed import grappe

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


@pytest.mark.slow
def test_lr_find_plots_and_writes_a_file_and_says_when_there_is_nothing_to_suggest(tmp_path: Path, capfd) -> None:
    out = tmp_path / "lr.json"
    words = ["lr-find", "digits", "lr=1e-6", "--steps", "20", "--seeds", "1", "--plan", "threads=1"]
    assert grappe(*words, "--out", str(out)) == 1
    told = capfd.readouterr().out
    for words in ("no suggestion", "Give a larger --highest", "learning rate"):
        assert words in told
    assert json.loads(out.read_text())["band"] is None


def test_curves_go_to_a_file_and_reports_where_they_are_asked(tmp_path: Path) -> None:
    run = Run(train(tmp_path / "run").run)
    for words in (["curves", str(run.folder), "--out", str(tmp_path / "a.csv")], ["report", str(run.folder)]):
        assert grappe(*words) == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 9 + 3 + 3 + 1  # steps, evaluations, epochs, waits
    assert (run.folder / "report.html").is_file()
    rows = dict(zip(*(column.cells for column in describe(run.folder).columns), strict=True))
    assert "core-hours" in rows["used"]


def test_a_study_is_shown_with_a_command_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"fixed_fields": {"epochs": "3"}, "space": {"lr": "0.1..1.0"}, "plan": "replicate=2"}
    study = make_study(tmp_path, dataclasses.replace(SEARCH, metric="accuracy", maximize=True, **fields))
    assert grappe("tune", "--study", str(tmp_path), "--dry-run") == 1
    assert "no trial has a result" in capsys.readouterr().out
    filled(
        study,
        Trial(number=0, fields={"lr": "0.2"}, state="complete", value=0.5, step=9, rungs=(0.5,)),
        Trial(number=1, fields={"lr": "0.3"}, state="failed", reason="DivergedError: \x1b[2Jnan"),
        Trial(number=2, fields={"lr": "0.4"}),
    )
    assert grappe("tune", "--study", str(tmp_path), "--dry-run") == 0
    told = capsys.readouterr().out
    command = "grappe train digits epochs=3 lr=0.2 --plan replicate=2"
    for words in ("best: trial 0, accuracy 0.5", command, "failed: DivergedError", "open"):
        assert words in told
    assert "\x1b" not in told


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
