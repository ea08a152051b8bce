"""grappe prune, and what grappe runs says of a run that was started again."""

from pathlib import Path

import pytest

from grappe.checkpoint.lease import Lease
from grappe.cli import commands
from grappe.training.run import Run
from tests.parity.tasks import Images
from tests.training.test_training import train


def names(run: Path) -> list[str]:
    return sorted(one.name for one in (run / "checkpoints").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 3 to 9 and a half-written one; the newest does not verify."""
    folder = train(tmp_path / "runs/a", Images(epochs=3), save_every=1, keep=7).run
    (folder / "checkpoints/.step-000010.dead").mkdir()
    (folder / "checkpoints/.step-000010.dead/rank-0.safetensors").write_bytes(bytes(100))
    (folder / "checkpoints/step-000009/state.json").write_text("{}")
    return folder


def test_prune_keeps_the_newest_that_verify_and_the_best(run: Path, capsys: pytest.CaptureFixture) -> None:
    before = names(run)
    capsys.readouterr()
    assert commands.app(["prune", str(run), "--keep", "2", "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert names(run) == before
    assert commands.app(["prune", str(run), "--keep", "2"]) == 0
    told = capsys.readouterr().out
    assert told.split()[1:] == planned.split()[2:], "it did something else than it said"
    best = min((one for one in Run(run).records("evaluation") if one["step"] < 9), key=lambda one: one["loss"])["step"]
    assert names(run) == sorted({f"step-{step:06d}" for step in (best, 7, 8, 9)})
    latest = Run(run).latest()
    assert latest.step == 8
    assert ".step-000010.dead" in told
    commands.app(["prune", str(run), "--keep", "2"])
    assert capsys.readouterr().out == "nothing to remove\n"


def test_a_run_that_is_written_is_left_alone(run: Path) -> None:
    before = names(run)
    lease = Lease(run)
    lease.take()
    try:
        assert commands.app(["prune", "--runs", str(run.parent), "--keep", "1"]) == 0
    finally:
        lease.release()
    assert names(run) == before


def test_runs_says_what_changed_and_what_verifies(run: Path, capsys: pytest.CaptureFixture) -> None:
    train(run, Images(epochs=4, dropout=0.5), steps=10)
    capsys.readouterr()
    assert commands.app(["runs", str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "restarts 1" in told
    assert "restart 1 at step 8: field epochs: 3 -> 4" in told
    assert "restart 1 at step 8: field dropout: 0.0 -> 0.5" in told
    assert "step-000008: verified" in told
