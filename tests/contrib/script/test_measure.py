"""grappe measure --script: a script for one process under each plan, and what it cannot have measured."""

import json
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.contrib.script.launch import launch
from grappe.contrib.script.measure import measure_script
from grappe.errors import PlanError, UsageError
from grappe.training.run import Run
from grappe.verbs.measure.measure import gather
from grappe.verbs.measure.points import MeasureOptions
from tests.launch.test_rank import two_nodes

PLAN = "device=cpu,threads=1"
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
print("its own line")
data = TensorDataset(torch.randn(200, 16), torch.randint(0, 3, (200,)))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
own = tuple(model.parameters()) if "own" in sys.argv else []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(int(sys.argv[1])):
    for x, y in DataLoader(data, 20, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(model.state_dict(), "trained.pt")
"""


def test_a_script_is_measured_under_each_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    plans = [PLAN, f"{PLAN},replicate=2"]
    typed = ["measure", "--steps", "8", "--repeats", "2", *(f"--plan={plan}" for plan in plans)]
    assert app([*typed, "--json", "--script", "train.py", "40"]) == 0
    said = capfd.readouterr()
    assert "its own line" not in said.out
    content = json.loads(said.out)
    alone, pair = content["points"]
    assert (content["task"], alone["plan"], pair["plan"]) == ("train.py", PLAN, "device=cpu,replicate=2,threads=1")
    assert [len(point["trials"]) for point in (alone, pair)] == [2, 2]
    assert (alone["batch"], pair["batch"], pair["processes"], alone["speed_up"]) == (20, 20, 2, 1.0)
    assert alone["samples_per_second"] > 100 and alone["memory"] > 1e7
    assert pair["shares"]["communication"] > 0
    assert not Path("runs").exists() and not Path("trained.pt").exists(), "which the script saves after ten steps"


def test_what_a_script_cannot_have_measured_is_a_row_or_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    options = MeasureOptions(steps=5, repeats=1)
    alone, pair = measure_script("train.py", ["2", "own"], [PLAN, f"{PLAN},shard=2"], options=options)
    assert not alone.failure and "keeps parameters in own" in pair.failure
    with pytest.raises(UsageError, match="takes 0 steps of an optimizer, of which the first 5 warm up"):
        measure_script("train.py", ["0"], [PLAN], options=options)
    with pytest.raises(PlanError, match="an unedited script can have"):
        measure_script("train.py", ["2"], [PLAN, f"{PLAN},tensor=2"], options=options)
    Path("own.py").write_text("import grappe")
    with pytest.raises(UsageError, match=r"own.py uses grappe: give a script for one process"):
        measure_script("own.py", [], [PLAN])
    for words in ("", "digits --script train.py", "--site narval --script train.py", "--script train.py --plan a"):
        with pytest.raises(UsageError, match=r"grappe measure needs a task; or a script|--plan after --script"):
            app(["measure", *words.split()])


def test_a_launched_run_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert launch("train.py", ["2"], PLAN, run=Path("run")) == 0
    (point,) = gather([Path("run")])
    assert (point.plan, point.batch, len(point.trials)) == (PLAN, 20, 1)
    assert Run("run").read_description()["costs"][0]["samples"] == 400


def test_a_launchers_processes_measure_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in two_nodes(0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="starts its own processes: run it without torchrun or srun"):
        measure_script("train.py", [], ["replicate=2"])
