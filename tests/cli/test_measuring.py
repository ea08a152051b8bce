"""Tests that wrong arguments of measure, report, follow and curves are refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.errors import GrappeError
from grappe.training.run import Run
from grappe.verbs.runs import describe
from tests.training.test_training import train


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["measure", "digits", "--steps", "0"], "--steps=0: it must be at least 1"),
        (["measure", "digits", "--repeats", "-1"], "--repeats=-1"),
        (["measure", "digits", "batch_size=64,many"], "batch_size=64,many: give whole numbers from 1"),
        (["measure", "digits", "--plan", "replicate=two"], "replicate=two"),
        (["measure", "digitz"], "did you mean digits"),
        (["report", "nowhere"], "nowhere is not a run"),
        (["report"], "nothing to report"),
        (["follow", "nowhere"], "nowhere is not a run"),
        (["curves", "nowhere"], "nowhere is not a run"),
        (["curves"], "no run given"),
        (["train", "digits", "--log", "visdom"], "there is mlflow, tensorboard, trackio, wandb"),
        (["train", "digits", "--profile", "7"], "there are process 0 to 0"),
        (["train", "digits", "--profile", "first"], "--profile=first"),
        (["train", "digits", "--profile-steps", "0"], "--profile-steps=0"),
    ],
)
def test_wrong_use(words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GrappeError) as refused:
        app(words, exit_on_error=False, print_error=False)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_curves_go_to_a_file_and_reports_where_they_are_asked(tmp_path: Path) -> None:
    run = Run(train(tmp_path / "run").run)
    for words in (["curves", str(run.folder), "--out", str(tmp_path / "a.csv")], ["report", str(run.folder)]):
        assert app(words, exit_on_error=False, print_error=False) == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 9 + 3 + 3 + 1  # steps, evaluations, epochs, waits
    assert (run.folder / "report.html").is_file()
    rows = dict(zip(*(column.cells for column in describe(run.folder).columns), strict=True))
    assert "core-hours" in rows["used"]
