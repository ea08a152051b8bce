"""grappe verify as a user runs it: exit codes, and the JSON that it leaves."""

import json
from pathlib import Path

from tests.commands import GRAPPE, ran

ROOT = str(Path(__file__).parents[2])
PLAN = "replicate=2,threads=1,workers=0,device=cpu"


def verify(folder: Path, task: str, *more: str) -> tuple[int, str, str]:
    done = ran(GRAPPE, "verify", task, "samples=64", "--plan", PLAN, *more, cwd=folder, PYTHONPATH=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_a_plan_that_learns_something_else_ends_with_1_and_is_written_down(tmp_path: Path) -> None:
    code, out, err = verify(tmp_path, "tests.parity.planted:Noisy", "--out", "found.json", "--json")
    assert code == 1, err
    [found] = json.loads(out)["findings"]
    assert found["verdict"] == "different"
    assert "replicate=2" in found["plan"]
    kept = (tmp_path / "found.json").read_text()
    assert "a dataset that draws" in kept and json.loads(kept)["findings"] == [found]
    assert "differs from one process in step" in err and "looking for the cause" in err


def test_one_that_learns_the_same_ends_with_0(tmp_path: Path) -> None:
    code, out, err = verify(tmp_path, "tests.parity.tasks:Images")
    assert code == 0, err
    assert "same" in out


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    done = ran(GRAPPE, "verify", "digits", cwd=tmp_path)
    assert done.returncode == 2
    assert "give --plan replicate=2" in done.stderr
