"""A launched script is a run: its curves, and what it does after a kill, a signal, and a change of the script."""

import io
import re
import signal
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from grappe.contrib.script.launch import launch
from grappe.contrib.script.variables import variables_of
from grappe.errors import EXIT_INTERRUPTED, ProcessDied, RunError, TaskError
from grappe.training.run import Run
from grappe.training.task_reference import reference_of
from grappe.verbs.follow import follow
from grappe.verbs.report.report import report
from grappe.verbs.runs import listing
from tests.cli.test_corrections import answer_to
from tests.contrib.script.plainly import as_it_is

ONE = "device=cpu,threads=1"
TWO = "device=cpu,replicate=2,threads=1"
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x, y = torch.randn(42, 8), torch.randint(0, 3, (42,))
own = torch.Generator().manual_seed(5)
noise = np.random.default_rng(3)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
scaled = nn.Tanh()
average = [each.detach().clone() for each in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


class Rows(TensorDataset):
    def __getitem__(self, number):
        return scaled(x[number]), int(y[number])  # what a dataset reads is read again, its modules run again


loader = DataLoader(Rows(x, y), 10, shuffle=True, generator=own)
log = open(sys.argv[1] + ".log", "w")
best, history = 1e9, []


def train(epoch):
    model.train()
    right = 0
    began = time.time()
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        output = model(inputs)
        loss = F.cross_entropy(output, labels)
        slope, = torch.autograd.grad(outputs=loss, inputs=model[4].bias, create_graph=True)
        loss = loss + 0.1 * slope.square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        right += (output.argmax(1) == labels).sum().item()
        history.append(loss.item() * (1 + 1e-3 * noise.random()))
        with torch.no_grad():
            for mean, each in zip(average, model.parameters()):
                mean.lerp_(each, 0.1)
        if epoch == 1 and number == 3 and "DIE" in os.environ:
            while "kill" in os.environ["DIE"] and not Path("run/checkpoints/step-000008").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL if "kill" in os.environ["DIE"] else signal.SIGUSR1)
        print(epoch, number, f"{loss.item():.4f} {sum(history):.3f}", flush=True)
    took = time.time() - began
    print(f"loss of the last batch {loss.item():.4f}, right {right}", flush=True)


def test():
    model.eval()
    with torch.no_grad():
        wrong = sum((model(inputs).argmax(1).numpy() != labels.numpy()).sum() for inputs, labels in DataLoader(
            TensorDataset(x[:20], y[:20]), 8))
        return float(wrong) + F.cross_entropy(model(x), y)


for epoch in range(3):
    train(epoch)
    score = test()
    plateau.step(score)
    best = min(best, score.item())
    print("best", f"{best:.4f} {optimizer.param_groups[0]['lr']}", file=log, flush=True)
torch.save({**model.state_dict(), **{str(n): each for n, each in enumerate(average)}}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the script has run as it is, and what it printed."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, as_it_is(SCRIPT, folder, "out.pt")


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        (ONE, "kill"),
        (TWO, "signal"),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((TWO, "kill"), (ONE, "signal"))),
    ],
)
def test_a_script_that_was_ended_in_an_epoch_goes_on_to_the_same_weights_and_lines(
    plan: str,
    how: str,
    plain: tuple[Path, str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, lines = plain
    Path("train.py").write_text(SCRIPT)
    run = Path("run")
    with monkeypatch.context() as patched:
        patched.setenv("DIE", how)
        if how == "kill":
            with pytest.raises(ProcessDied, match="was killed by SIGKILL"):
                launch("train.py", ["out.pt"], plan, run=run, save_every=4)
        else:
            assert launch("train.py", ["out.pt"], plan, run=run, save_every=4) == EXIT_INTERRUPTED
    first = capfd.readouterr()
    assert lines.startswith(first.out) and first.out.count("\n") >= 8
    if how == "signal":
        assert f"resume: grappe launch --plan {plan} --run run --save-every 4 train.py out.pt" in first.err
        assert Run(run).read_status(Run(run).read_description()) == "interrupted"
    reached = Run(run).latest()
    assert reached is not None and 8 <= reached.step < 15
    assert launch("train.py", ["out.pt"], plan, run=run, save_every=4) == 0
    second = capfd.readouterr()
    assert lines.endswith(second.out) and len(first.out) + len(second.out) >= len(lines)
    one, two = torch.load(folder / "out.pt"), torch.load("out.pt")
    for name, tensor in one.items():
        apart = (tensor.double() - two[name]).norm() / tensor.double().norm()
        assert apart == 0 if plan == ONE else apart <= 1e-5, name
    assert Path("out.pt.log").read_text() == (folder / "out.pt.log").read_text()
    steps = list(Run(run).records("step"))
    assert [record["step"] for record in steps] == list(range(1, 16))
    printed = [float(line.split()[2]) for line in lines.splitlines() if line[0].isdigit()]
    assert np.allclose([record["loss"] for record in steps], printed, rtol=0, atol=2e-4)
    assert [record["samples"] for record in steps] == [
        42 * epoch + n for epoch in range(3) for n in (10, 20, 30, 40, 42)
    ]
    assert {record["lr"] for record in steps[:5]} == {0.05}
    assert [size["step"] for size in Run(run).read_description()["sizes"]] == [0, reached.step]


def test_a_script_s_run_is_shown_as_others_are(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT + "\nprint('to the error stream', file=sys.stderr)")
    assert launch("train.py", ["out.pt"], ONE, save_every=4) == 0
    said = capfd.readouterr()
    assert "to the error stream" not in said.out and "to the error stream" in said.err
    [folder] = Path("runs").iterdir()
    assert folder.name.startswith("train-")
    description = Run(folder).read_description()
    assert description["task"] == "train.py" and description["fields"] == {"arguments": "out.pt"}
    assert description["status"] == "finished" and description["costs"][0]["timing"]["steps"] > 5
    assert description["costs"][0]["peak"]["host"] > 1e7
    shown = io.StringIO()
    Console(file=shown, width=200).print(listing(Path("runs")))
    assert re.search(r"train-\S+ +finished +15 ", shown.getvalue()), "the step at which it ended, not the last saved"
    assert Run(folder).table()["step"] == [15]
    page = report([folder])
    assert "train.py" in page.read_text()
    assert follow(folder, shown) == "finished"
    told = answer_to(f"resume {folder}")
    assert told.endswith(f"grappe launch --plan {description['plan']} --run {folder} train.py out.pt")
    with pytest.raises(TaskError, match=r"is the run of a script, whose model grappe cannot make: evaluate, predict"):
        reference_of(Run(folder))
    assert launch("train.py", ["out.pt"], ONE, run=folder) == 0
    assert "is finished: nothing to do" in capfd.readouterr().err


SHORT = """
import random, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = {start}
for number, (x,) in enumerate({batches}):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if number == 2 and len(sys.argv) == 1:
        raise ValueError("the disk is full")
"""
LOADER = "DataLoader(TensorDataset(torch.randn(40, 3)), 4)"


@pytest.mark.parametrize(
    ("start", "batches", "again", "why"),
    [
        ("0", LOADER, "# changed", "run was trained with train.py as it was before: a script resumes as it began"),
        (
            "random.SystemRandom().random()",
            LOADER,
            "",
            r"cannot resume at step 2: __main__.start is \S+, and was \S+\. Begin another run",
        ),
        (
            "0",
            "[(each,) for each in torch.randn(9, 4, 3)]",
            "",
            "its batches come from no loop over a torch.utils.data.DataLoader",
        ),
        ("[[each] for each in range(200_001)]", LOADER, "", "its variables hold more than 200,000 values"),
    ],
)
def test_a_script_that_cannot_be_brought_back_says_why(
    start: str, batches: str, again: str, why: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(SHORT.format(start=start, batches=batches))
    with pytest.raises(ProcessDied, match="ValueError"):
        launch("train.py", [], ONE, run=Path("run"), save_every=1)
    run = Run("run")
    assert run.read_status(run.read_description()) == "failed: ValueError: the disk is full"
    assert len(list(run.records("step"))) >= 2
    if "randn(9" in batches or "001" in start:
        assert f"grappe: no checkpoints: {why}" in capfd.readouterr().err
        return
    Path("train.py").write_text(Path("train.py").read_text() + again)
    with pytest.raises(RunError, match=why):
        launch("train.py", [], ONE, run=Path("run"))


def test_numbers_of_an_enum_or_of_numpy_are_those_that_a_checkpoint_gives_back() -> None:
    mode, mean, done = signal.SIGINT, np.float64(0.5), True  # variables of this frame
    bound = types.MethodType(len, (7,))  # which has no code
    numbers = {path.rpartition(" ")[2]: number for path, number in variables_of([]).numbers.items()}
    assert [repr(numbers[name]) for name in ("mode", "mean", "done")] == ["2", "0.5", "True"]
    assert numbers["bound.__self__[0]"] == 7
    assert (mode, mean, done, bound()) == (2, 0.5, True, 1)


LENGTHS = """
from pathlib import Path
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self):
        self.words, self.lengths = torch.randint(1, 20, (40, 9)), torch.randint(1, 10, (40,))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.words[index], self.lengths[index]


torch.manual_seed(0)
model = torch.nn.ModuleDict({"words": torch.nn.Embedding(20, 6), "gru": torch.nn.GRU(6, 8, batch_first=True)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, steps = Sentences(), 0
for epoch in range(3):
    for words, lengths in DataLoader(data, 8, shuffle=True):
        lengths, order = lengths.sort(descending=True)
        words = words[order][:, : int(lengths[0])]
        packed = pack_padded_sequence(model["words"](words), lengths, batch_first=True)
        output, _ = pad_packed_sequence(model["gru"](packed)[0], batch_first=True)
        mask = torch.arange(int(lengths[0]))[None] < lengths[:, None]
        optimizer.zero_grad()
        (output * mask.unsqueeze(2)).square().sum(1).mean().backward()
        optimizer.step()
        steps += 1
        if steps == 12 and not Path("once").exists():
            Path("once").touch()
            raise ValueError("the disk is full")
print(sum(float(each.detach().double().abs().sum()) for each in model.parameters()))
"""


def test_a_script_whose_batches_have_lengths_is_brought_back_by_its_own_batches(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Masks have the lengths that the script read: the first batch again has others."""
    Path("train.py").write_text(LENGTHS)
    Path("once").touch()
    plainly = as_it_is(LENGTHS, here)
    Path("once").unlink()
    with pytest.raises(ProcessDied, match="ValueError"):
        launch("train.py", [], ONE, run=Path("run"), save_every=2)
    capfd.readouterr()
    assert launch("train.py", [], ONE, run=Path("run"), save_every=2) == 0
    said = capfd.readouterr()
    assert said.out == plainly
    assert "run: on its way back to step 10 the script failed with RuntimeError: " in said.err, said.err
