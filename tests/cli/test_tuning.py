"""Wrong use of grappe tune: refused with what to do, before anything is trained; and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.errors import GrappeError
from grappe.verbs.tune.study import SearchDefinition, Trial, make_study


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digits", "lrr=0.1..1"], "did you mean lr"),
        (["digits", "lr=1..0.1"], "lr=1..0.1: the range is upside down"),
        (["digits", "lr=0..1:log"], "a logarithmic range is above 0"),
        (["digits", "lr=0.1"], "nothing is searched"),
        (["digits", "lr=0.1..1", "--trials", "0"], "--trials=0: it must be at least 1"),
        (["digits", "lr=0.1..1", "--parallel", "0"], "--parallel=0: it must be at least 1"),
        (["digits", "lr=0.1..1", "--metric", "accuracy"], "add --maximize or --minimize"),
        (["digits", "lr=0.1..1", "--metric", "acuracy", "--maximize"], "did you mean accuracy"),
        (["digits", "lr=0.1..1", "--sampler", "grid"], "a grid needs values"),
        (["digits", "lr=0.1|1", "--sampler", "grid", "--trials", "3"], "the grid has 2 cells"),
        (["digits", "lr=0.1..1", "--steps-only"], "--steps-only has no evaluation"),
        (["digits", "lr=0.1..1", "--plan", "per_device=2"], "per_device"),
        (["digits", "lr=0.1..1", "--plan", "replicate=two"], "replicate=two"),
        (["digits", "lr=0.1..1", "--study", "full"], "holds thesis.tex and is not a study"),
        (["--dry-run"], "which task?"),
        (["digits", "lr=0.1..1", "--dry-run", "--sampler", "grid"], "a grid needs values"),
        (["--study", "full", "--dry-run"], "is not a study"),
        ([], "which task?"),
    ],
)
def test_wrong_use(words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(GrappeError) as refused:
        app(["tune", *words], exit_on_error=False, print_error=False)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert [entry.name for entry in tmp_path.rglob("*")] == ["full", "thesis.tex"]


def test_it_is_not_started_by_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_RUN_ID", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(GrappeError, match="start it without torchrun or srun"):
        app(["tune", "digits", "lr=0.1..1"], exit_on_error=False, print_error=False)


def test_a_study_is_shown_with_a_command_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = SearchDefinition(
        task="digits",
        fields={"epochs": 3},
        fixed_fields={"epochs": "3"},
        space={"lr": "0.1..1.0"},
        plan="replicate=2",
        metric="accuracy",
        maximize=True,
        sampler="random",
        seed=0,
        parallel=1,
        threads=1,
    )
    study = make_study(tmp_path, search)
    assert app(["tune", "--study", str(tmp_path), "--dry-run"], exit_on_error=False, print_error=False) == 1
    assert "no trial has a result" in capsys.readouterr().out
    study.write(Trial(number=0, fields={"lr": "0.2"}, state="complete", value=0.5, step=9, rungs=(0.5,)))
    study.write(Trial(number=1, fields={"lr": "0.3"}, state="failed", reason="DivergedError: \x1b[2Jnan"))
    study.write(Trial(number=2, fields={"lr": "0.4"}))
    assert app(["tune", "--study", str(tmp_path), "--dry-run"], exit_on_error=False, print_error=False) == 0
    told = capsys.readouterr().out
    assert "best: trial 0, accuracy 0.5" in told
    assert "grappe train digits epochs=3 lr=0.2 --plan replicate=2" in told
    assert "failed: DivergedError" in told
    assert "\x1b" not in told
    assert "open" in told
