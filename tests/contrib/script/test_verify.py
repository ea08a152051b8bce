"""grappe verify --script: what launch runs under a plan is one process's, or the first step and tensor that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.contrib.script.verify import ScriptTrial, judged, verify_script
from grappe.errors import UsageError
from tests.commands import GRAPPE, Command

PLAN = "replicate=2,device=cpu,threads=1"

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
fault = parser.parse_args().fault
torch.manual_seed(1)
x, y = torch.randn(74, 6), torch.randint(0, 3, (74,))
encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1))
head, norm = nn.Linear(8, 3), nn.BatchNorm1d(6)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (encoder, head)]
for number, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), 8, shuffle=True)):
    if fault == "statistics" and number >= 2:
        inputs = norm(inputs)
    loss = F.cross_entropy(head(encoder(inputs)), labels)
    print(f"{number} {loss.item():.4f}")
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
"""


def test_a_script_that_learns_the_same_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = Command(GRAPPE, "verify", "--plan", PLAN, "--script", "train.py", "--fault", "none", cwd=tmp_path)
    try:
        code, out, err = command.end()
    finally:
        command.close()
    assert code == 0, err
    assert "same: replicate=2,device=cpu,threads=1 learns what train.py learns on one process" in out.replace("\n", " ")


def test_an_option_after_the_script_is_said_to_be_the_script_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--plan after --script was the script's own option"):
        app(["verify", "--script", "train.py", "--plan", PLAN])
    with pytest.raises(UsageError, match="--against takes a task, and no --script"):
        app(["verify", "--plan", PLAN, "--script", "train.py", "--against", "other.py"])
    with pytest.raises(UsageError):
        app(["verify", "--plan", PLAN, "--script", "none.py", "--out", "found.json"])
    assert "--out after --script went to none.py: write grappe's options before --script" in capsys.readouterr().err


def test_the_first_step_and_tensor_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    found = verify_script("train.py", ["--fault", "statistics"], f"{PLAN},batchnorm=local", steps=6)
    assert (found.step, found.tensors) == (5, 8), "two optimizers step for each batch, and the third batch differs"
    assert found.difference.startswith("the gradient of 0.weight: ")
    with pytest.raises(UsageError, match="needs a plan of several processes"):
        verify_script("train.py", [], "device=cpu")


def test_a_script_that_saves_at_a_compared_step_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saves = '    loss.backward()\n    torch.save(head.state_dict(), "head.pt")\n'
    Path("train.py").write_text(SCRIPT.replace("    loss.backward()\n", saves))
    found = verify_script("train.py", [], PLAN, steps=3)
    assert (found.step, found.tensors, found.difference) == (3, 8, "")


def test_gradients_that_are_zero_but_for_rounding_are_not_judged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    normed = "nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()"
    Path("train.py").write_text(SCRIPT.replace("nn.Linear(6, 8), nn.Tanh()", normed).replace("optim.SGD", "optim.Adam"))
    found = verify_script("train.py", [], PLAN, steps=4)
    assert found.learns_the_same, found.difference
    assert "not judged: " in found.notes[0] and "0.bias" in found.notes[0]
    found = verify_script("train.py", ["--fault", "statistics"], f"{PLAN},batchnorm=local", steps=6)
    assert not found.learns_the_same


def test_lines_are_compared_and_what_rounding_moves_is_not_judged() -> None:
    one = ScriptTrial(steps=2, apart={}, lines=["loss 0.5", "10:31", "8 rows"])
    moved = ScriptTrial(steps=2, apart={(1, "a"): 0.01, (1, "b"): 1e-6}, lines=["loss 0.5", "10:32", "8 rows"])

    def several(b: float, line: str = "8 rows") -> ScriptTrial:
        return ScriptTrial(steps=2, apart={(1, "a"): 0.5, (1, "b"): b}, lines=["loss 0.5", "10:33", line])

    same = judged(one, moved, several(9e-6))
    assert same.learns_the_same and same.largest == 9e-6
    assert "not judged: a" in same.notes[0]
    assert judged(one, moved, several(2e-5)).difference == "b: 2.0e-05 of its norm apart, 1e-05 is tolerated"
    other = judged(one, moved, several(9e-6, "4 rows"))
    assert other.difference == "printed line 3: '8 rows' on one process, '4 rows' under the plan"
