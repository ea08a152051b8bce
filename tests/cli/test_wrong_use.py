"""Wrong use of commands that try something out: refused with what to do, before anything is trained or written."""

from pathlib import Path

import pytest

from tests.typed import refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("lr-find digits --steps 3", "--steps=3: it must be at least 20"),
        ("lr-find digits --plan replicate=two", "replicate=two"),
        ("lr-find digitz", "did you mean digits"),
        ("lr-find digits lr=0 --plan threads=1", "lr=0"),
        ("measure digits --steps 0", "--steps=0: it must be at least 1"),
        ("measure digits --repeats -1", "--repeats=-1"),
        ("measure digits batch_size=64,many", "batch_size=64,many: give whole numbers from 1"),
        ("measure digits --plan replicate=two", "replicate=two"),
        ("verify digits", "give --plan replicate=2"),
        ("report nowhere", "nowhere is not a run"),
        ("curves nowhere", "nowhere is not a run"),
        ("curves", "no run given"),
        ("train digits --log visdom", "there is mlflow, tensorboard, wandb"),
        ("train digits --profile 7", "there are process 0 to 0"),
        ("train digits --profile first", "--profile=first"),
        ("train digits --profile-steps 0", "--profile-steps=0"),
        ("tune digits lrr=0.1..1", "did you mean lr"),
        ("tune digits lr=0.1", "nothing is searched"),
        ("tune digits lr=0.1..1 --trials 0", "--trials=0: it must be at least 1"),
        ("tune digits lr=0.1..1 --parallel 0", "--parallel=0: it must be at least 1"),
        ("tune digits lr=0.1..1 --metric accuracy", "add --maximize or --minimize"),
        ("tune digits lr=0.1..1 --metric acuracy --maximize", "did you mean accuracy"),
        ("tune digits lr=0.1..1 --sampler grid", "a grid needs values"),
        ("tune digits lr=0.1|1 --sampler grid --trials 3", "the grid has 2 cells"),
        ("tune digits lr=0.1..1 --steps-only", "--steps-only has no evaluation"),
        ("tune digits lr=0.1..1 --plan per_device=2", "per_device"),
        ("tune digits lr=0.1..1 --plan replicate=two", "replicate=two"),
        ("tune digits lr=0.1..1 --study full.json", "holds thesis.tex and is not a study"),
        ("tune digits lr=0.1..1 --dry-run --sampler grid", "a grid needs values"),
        ("tune --study full.json --dry-run", "is not a study"),
        ("tune --dry-run", "which task?"),
        ("tune", "which task?"),
        *(
            (f"{command} --out={out}", f"--out={out}: … {why}")
            for command in ("foresee digits", "measure digits", "lr-find digits", "verify digits -p replicate=2")
            for out, why in (("a.csv", "end in .json"), ("no/a.json", "no folder no"), ("full.json", "it is a folder"))
        ),
        ("report a --out /dev/null", "--out=/dev/null: it is no regular file"),
        ("predict a b --out /dev/null", "--out=/dev/null: it is no regular file"),
    ],
)
def test_wrong_use(words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full.json").mkdir()
    (tmp_path / "full.json" / "thesis.tex").touch()
    said = refused(*words.split())
    assert all(part in said for part in told.split(" … ")), said
    assert [entry.name for entry in tmp_path.rglob("*")] == ["full.json", "thesis.tex"]


def test_a_study_is_not_started_by_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in (world | place).items():
        monkeypatch.setenv(name, value)
    assert "start it without torchrun or srun" in refused("tune", "digits", "lr=0.1..1")
