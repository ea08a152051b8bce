"""A script for one process under each key of a plan: the numbers of one process, or a refusal that names the key."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe.contrib.script.launch import launch
from grappe.errors import EXIT_INTERRUPTED, GrappeError, PlanError, ProcessDied, TaskError
from grappe.training.run import Run
from tests.contrib.script.plainly import as_it_is
from tests.needs import need

CPU = ",device=cpu,threads=1"
SCRIPT = """
import copy, os, signal, sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x, y = torch.randn(74, 6), torch.randint(0, 3, (74,))
rate = 0.0 if "certain" in sys.argv else 0.2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(rate)

    def forward(self, rows):
        return rows + self.dropout(F.gelu(self.inner(self.norm(rows))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, rows):
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
best = None
for epoch in range(2):
    model.train()
    for number, (rows, labels) in enumerate(DataLoader(TensorDataset(x, y), 16, shuffle=True)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if epoch == 1 and number == 1 and "STOP" in os.environ:
            os.kill(os.getpid(), signal.SIGUSR1)
        print(epoch, number, f"{loss.item():.4f} {norm.item():.4f}")
    model.eval()
    with torch.no_grad():
        print("test", f"{F.cross_entropy(model(x), y).item():.4f}")
    if best is None and "whole" not in sys.argv:
        best = copy.deepcopy(model)
if best is not None:
    print("after an epoch", f"{best.train()(x.to(best.head.weight.dtype)).shape}")
    torch.save(best, sys.argv[1] + ".module")
else:
    torch.save(model.state_dict(), sys.argv[1] + ".best")
    model.load_state_dict(torch.load(sys.argv[1] + ".best"))
    print("again", f"{F.cross_entropy(model(x), y).item():.4f}")
torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the script has run as it is, with what it printed in `.txt`: by its second argument."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("random", "certain", "whole"):
        Path(folder, f"{name}.txt").write_text(as_it_is(SCRIPT, folder, name, name))
    return folder


def apart(one: Path, two: Path) -> float:
    """Returns the largest |a - b| / |a| of the tensors of two files."""
    first, second = torch.load(one), torch.load(two)
    return max(
        float((first[name].double() - second[name].double()).norm() / first[name].double().norm()) for name in first
    )


@pytest.mark.parametrize(
    ("plan", "kind", "most", "same_lines"),
    [
        pytest.param("recompute,channels_last", "random", 1e-5, True, id="one process"),
        pytest.param("replicate=2,recompute", "random", 1e-5, True, id="replicas"),
        pytest.param("shard=2,recompute", "whole", 1e-5, True, id="shards"),
        pytest.param("replicate=2,precision=fp64", "random", 1e-5, False, id="fp64"),
        pytest.param(
            "replicate=2,precision=tf32", "random", 1e-5, True, id="tf32, which is a GPU's", marks=pytest.mark.nightly
        ),
        pytest.param("replicate=2,precision=bf16", "random", 3e-2, False, id="bf16"),
        pytest.param("shard=2,zero=2,precision=fp16", "whole", 5e-3, False, id="fp16"),
        pytest.param("compile", "certain", 1e-5, True, id="compile", marks=pytest.mark.nightly),
    ],
)
def test_a_script_under_a_key_learns_what_it_does_without(
    plan: str, kind: str, most: float, same_lines: bool, plain: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    need(plan)
    Path("train.py").write_text(SCRIPT)
    assert launch("train.py", ["out", kind], plan + CPU) == 0
    said = capfd.readouterr()
    if same_lines:
        assert said.out == (plain / f"{kind}.txt").read_text()
    assert apart(plain / kind, Path("out")) <= most
    if kind != "whole":
        assert "grappe" not in Path("out.module").read_bytes().decode("latin1").replace("_grappe", ""), (
            "a module that is saved has nothing of the plan's"
        )


@pytest.mark.slow
def test_a_run_under_keys_goes_on_to_the_same_bits(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(SCRIPT)
    plan = f"replicate=2,precision=bf16,recompute,channels_last{CPU}"
    assert launch("train.py", ["out", "random"], plan) == 0
    lines, whole = capfd.readouterr().out, torch.load("out")
    monkeypatch.setenv("STOP", "1")
    assert launch("train.py", ["out", "random"], plan, run=Path("run")) == EXIT_INTERRUPTED
    monkeypatch.delenv("STOP")
    assert launch("train.py", ["out", "random"], plan, run=Path("run")) == 0
    assert capfd.readouterr().out == lines
    assert all(torch.equal(whole[name], tensor) for name, tensor in torch.load("out").items())


def test_a_run_that_cannot_be_resumed_says_so(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    assert launch("train.py", ["out", "whole"], f"precision=fp16{CPU}", run=Path("run"), save_every=2) == 0
    assert "no checkpoints: precision=fp16 leaves out steps by what it sees: take bf16" in capfd.readouterr().err
    assert [record["step"] for record in Run("run").records("step")] == list(range(1, 11))


@pytest.mark.parametrize(
    ("plan", "error", "why"),
    [
        ("microbatches=2", PlanError, "and no microbatches: describe it as a task"),
        ("dropout=local,replicate=2", PlanError, "and no dropout=local"),
        ("compile,replicate=2", PlanError, "compile on several processes is not for an unedited script"),
        ("shard=2", TaskError, "the script keeps parameters in kept, which"),
    ],
)
def test_a_key_that_a_script_cannot_have_is_refused(
    tmp_path: Path, plan: str, error: type[Exception], why: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("model = Net()", "model = Net()\nkept = tuple(model.parameters())"))
    with pytest.raises(error, match=why):
        launch(file, ["out", "whole"], plan + CPU, base=tmp_path)


WITHOUT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

weight = torch.nn.Parameter(torch.zeros(6, 3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for (rows,) in DataLoader(TensorDataset(torch.randn(32, 6)), 8):
    (rows @ weight - 1).square().mean().backward()
    optimizer.step()
"""


def test_a_key_that_no_model_can_have_ends_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT)
    with pytest.raises(TaskError, match=r"precision=bf16 has no model: a step calls no torch\.nn\.Module"):
        launch(tmp_path / "train.py", [], f"precision=bf16{CPU}", base=tmp_path)


LOCAL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(32, 6), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows, targets in DataLoader(TensorDataset(x, y), 8):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(rows), targets).backward()
    optimizer.step()
torch.save(model.state_dict(), "out")
"""


def test_batchnorm_local_normalises_a_process_s_own_rows(here: Path) -> None:
    Path("train.py").write_text(LOCAL)
    assert launch("train.py", [], f"replicate=2,batchnorm=local{CPU}") == 0
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = model[1]
    for first in range(0, 32, 8):
        optimizer.zero_grad()
        before = {name: each.clone() for name, each in norm.named_buffers()}
        after = []
        for part in (slice(first, first + 4), slice(first + 4, first + 8)):
            norm.load_state_dict(before, strict=False)
            (nn.functional.mse_loss(model(x[part]), y[part]) / 2).backward()
            after.append({name: each.clone() for name, each in norm.named_buffers()})
        norm.load_state_dict(
            {name: ((a + after[1][name]) / 2).to(a.dtype) for name, a in after[0].items()}, strict=False
        )
        optimizer.step()
    for name, tensor in torch.load("out").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


TRAINING = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
kept, named = list(model.parameters()), dict(model.named_parameters())
for each in model.parameters():
    nn.init.uniform_(each.data, -0.3, 0.3)
for number, (rows, labels) in enumerate(DataLoader(TensorDataset(x, y), 8)):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(rows), labels)
    loss.backward()
    nn.utils.clip_grad_norm_([*kept[:2], named["2.weight"], each], 0.5)
    optimizer.step()
    {after}
    print(f"{loss.item():.5f}")
"""
OWN_CODE = {
    "an optimizer's state from a file": """torch.save(optimizer.state_dict(), "state.pt")
    optimizer.load_state_dict(torch.load("state.pt"))""",
    "draws like a parameter": """for each in model.parameters():
        each.data += 0.1 * torch.randn_like(each.data) + torch.empty_like(each.data).uniform_(0, 0.1)""",
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_a_script_s_own_code_with_shards_is_as_on_one_process(
    name: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(TRAINING.replace("{after}", OWN_CODE[name]))
    lines = []
    for plan in ("replicate=1", "shard=2"):
        assert launch("train.py", [], plan + CPU) == 0
        lines.append(capfd.readouterr().out)
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("after", "error", "why"),
    [
        (
            "model(rows).sum().backward(create_graph=True)",
            TaskError,
            r"train\.py:20 takes a derivative of a derivative",
        ),
        ("torch.autograd.grad(model(rows).sum(), rows, create_graph=True)", TaskError, r"train\.py:20 .*use replicate"),
        ("model[0].weight.data.add_(torch.ones(8, 6))", ProcessDied, "a parameter is in parts under shard"),
        ("print(rows @ model[0].weight.data.T)", GrappeError, r"in parts under shard \(train\.py:20\): use replicate"),
    ],
)
def test_what_shards_cannot_give_a_script_is_refused(after: str, error: type[Exception], why: str, here: Path) -> None:
    Path("train.py").write_text(TRAINING.replace("{after}", after))
    with pytest.raises(error, match=why):
        launch("train.py", [], f"shard=2{CPU}")
