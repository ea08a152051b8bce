"""A training that computes nothing is saved, or ended where it is, and resumes: --idle."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.training.run import Run
from tests.commands import GRAPPE, Command

STUCK = f"{Path(__file__).with_name('stuck.py')}:Sleepy"
Start = Callable[..., Command]
RESUMES = "--idle has ended it: the same run, started again, resumes from its last checkpoint"


@pytest.mark.nightly
def test_an_idle_training_is_ended_where_it_is_and_resumes(start: Start, tmp_path: Path) -> None:
    """Process 0 waits in a collective for process 1, or the other way around."""
    words = (GRAPPE, "train", STUCK, "--plan", "replicate=2,threads=1,workers=0,device=cpu", "--run", "run")
    code, out, err = start(*words, "--idle", "4s", "--save-every", "1").end()
    assert code == 75, err
    assert "grappe: --idle: no process has computed for 4 s: saving and ending" in out
    assert re.search(r"process [01] of 2 on \S+ makes no progress in its program, at \S+stuck.py, line \d+", err), err
    assert err.count(RESUMES) == 1 and "stall-rank" not in err
    saved = Run(tmp_path / "run").latest().step
    assert saved > 0
    assert start(*words, "--steps", str(saved)).end()[0] == 0, "the checkpoint is whole"


HANG = """
import os, signal, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(DataLoader(TensorDataset(torch.randn(400, 4), torch.randn(400, 1)), batch_size=8)):
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    while step == 30 and os.path.exists("hangs") and not (
        os.path.exists("wakes") and signal.getsignal(signal.SIGTERM).__self__.flag
    ):
        time.sleep(0.2)
torch.save(model.state_dict(), "weights.pt")
"""


@pytest.mark.parametrize(
    ("plan", "wakes", "saved"), [("replicate=2", False, 20), pytest.param("", True, 31, marks=pytest.mark.nightly)]
)
def test_an_idle_script_is_saved_or_ended_and_goes_on_with_its_numbers(
    start: Start, tmp_path: Path, plan: str, wakes: bool, saved: int
) -> None:
    """A step that ends within a minute is saved; one that does not has the last checkpoint before it."""
    (tmp_path / "script.py").write_text(HANG)
    (tmp_path / "hangs").touch()
    if wakes:
        (tmp_path / "wakes").touch()
    launch = (GRAPPE, "launch", *(("--plan", plan) if plan else ()), "--save-every", "20", "--run")
    code, _, err = start(*launch, "run", "--idle", "3s", "script.py").end()
    assert code == 75, err
    assert err.count("grappe: --idle: no process has computed for 3 s: saving and ending") == 1
    assert (RESUMES in err) != wakes
    assert Run(tmp_path / "run").latest().step == saved
    (tmp_path / "hangs").unlink()
    assert start(*launch, "run", "--idle", "none", "script.py").end()[0] == 0
    resumed = (tmp_path / "weights.pt").read_bytes()
    assert start(*launch, "whole", "script.py").end()[0] == 0
    assert (tmp_path / "weights.pt").read_bytes() == resumed
