"""grappe verify as a user runs it: its exit code, and the JSON that it leaves."""

import json
from pathlib import Path

from tests.commands import GRAPPE, ran

ROOT = str(Path(__file__).parents[2])


def test_a_plan_that_learns_something_else_ends_with_1_and_is_written_down(tmp_path: Path) -> None:
    words = ("tests.parity.planted:Noisy", "samples=64", "--plan", "replicate=2,threads=1,workers=0,device=cpu")
    done = ran(GRAPPE, "verify", *words, "--out", "found.json", "--json", cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 1, done.stderr
    [found] = json.loads(done.stdout)["findings"]
    assert found["verdict"] == "different"
    assert "replicate=2" in found["plan"]
    kept = (tmp_path / "found.json").read_text()
    assert "a dataset that draws" in kept and json.loads(kept)["findings"] == [found]
    assert "differs from one process in step" in done.stderr and "looking for the cause" in done.stderr
