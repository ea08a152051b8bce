"""load, evaluate and predict say which checkpoint they took, and why."""

import json
import shutil
from pathlib import Path

import pytest

import grappe
from grappe.cli import commands
from grappe.errors import RunError
from grappe.training.run import SCORES
from grappe.verbs import evaluate
from tests.parity.tasks import Images
from tests.training.test_training import train

PLAN = "threads=1,device=cpu"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 0 to 3."""
    return train(tmp_path_factory.mktemp("taken") / "run", Images(epochs=1), save_every=1, keep=9).run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def damage(run: Path, how: str) -> str:
    newest = run / "checkpoints/step-000003"
    if how == "damaged":
        (newest / "state.json").write_text("{}")
        return "step-000003 does not verify: skipped (state.json differs from what was saved)"
    shutil.rmtree(newest)
    if how == "emptied":
        newest.mkdir()
        return "step-000003 does not verify"
    if how == "renamed copy":
        shutil.copytree(run / "checkpoints/step-000002", run / "checkpoints/step-000090")
        return "step-000090 does not verify: skipped (it is the checkpoint of step 2, in a folder of another name)"
    return "step-000003, which run.json says was saved, is missing"


@pytest.mark.parametrize("how", ["damaged", "emptied", "missing", "renamed copy"])
def test_an_older_one_is_never_taken_in_silence(run: Path, how: str, capfd: pytest.CaptureFixture) -> None:
    words = damage(run, how)
    model = grappe.load(run)
    assert str(model.grappe_checkpoint).endswith("step-000002")
    error = capfd.readouterr().err
    assert words in error
    assert "step-000002 is taken" in error
    scores = grappe.evaluate(run, plan=PLAN)
    assert words in scores.why and scores.checkpoint == "step-000002"
    assert words in capfd.readouterr().err
    next(iter(grappe.predict(run, "validation")))
    assert words in capfd.readouterr().err


def test_the_newest_needs_no_words_but_the_result_says_it(run: Path, capfd: pytest.CaptureFixture) -> None:
    assert str(grappe.load(run).grappe_checkpoint).endswith("step-000003")
    scores = grappe.evaluate(run, plan=PLAN)
    assert (scores.checkpoint, scores.why) == ("step-000003", "newest")
    assert repr(scores).startswith("Scores(loss=") and repr(scores).endswith("checkpoint='step-000003')")
    assert "step-000003" in scores._repr_html_() and scores.to_pandas()["checkpoint"][0] == "step-000003"
    assert "step-" not in capfd.readouterr().err


def test_the_command_line_says_it(run: Path, capfd: pytest.CaptureFixture) -> None:
    damage(run, "damaged")
    assert commands.app(["evaluate", str(run), "--plan", PLAN, "--json"]) == 0
    out, error = capfd.readouterr()
    assert json.loads(out)["checkpoint"] == "step-000002" and "step-000003" in json.loads(out)["why"]
    assert "step-000002 is taken" in error
    assert commands.app(["predict", str(run), "validation", "--checkpoint", "1"]) == 0
    out, error = capfd.readouterr()
    assert "predictions of step-000001" in error and not any(
        "checkpoint" in json.loads(line) for line in out.splitlines()
    )


@pytest.mark.parametrize("which", ["3", "last", "best"])
def test_one_that_is_asked_for_is_never_another(run: Path, which: str) -> None:
    damage(run, "damaged")
    for verb in (
        grappe.load,
        grappe.evaluate,
        lambda run, checkpoint: next(grappe.predict(run, "test", checkpoint=checkpoint)),
    ):
        with pytest.raises(RunError):
            verb(run, checkpoint=which)


def test_older_ones_can_be_asked_for(run: Path) -> None:
    assert str(grappe.load(run, checkpoint=1).grappe_checkpoint).endswith("step-000001")
    scores = grappe.evaluate(run, plan=PLAN, checkpoint="2")
    assert scores.why == "as asked"
    kept = json.loads((run / SCORES).read_text())["validation"]
    assert (kept["checkpoint"], kept["loss"]) == ("step-000002", scores.loss)


def test_a_checkpoint_that_its_training_removes_meanwhile_is_replaced_by_a_newer_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    original = evaluate.short_run

    def removed_first(*arguments, **options):
        monkeypatch.setattr(evaluate, "short_run", original)
        shutil.rmtree(run / "checkpoints" / "step-000003")
        return original(*arguments, **options)

    monkeypatch.setattr(evaluate, "short_run", removed_first)
    assert grappe.evaluate(run, plan=PLAN).checkpoint == "step-000002"
    assert "has removed step-000003 meanwhile" in capfd.readouterr().err
