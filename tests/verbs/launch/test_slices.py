"""Scripts for one process, unedited, on several: the weights and the printed lines of one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import grappe
from grappe.errors import DivergedError, PlanError, TaskError, UsageError
from grappe.verbs.launch.launch import launch

PLAN = "replicate=2,device=cpu,threads=1"
HEAD = """
import argparse, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--save")
options = parser.parse_args()
torch.manual_seed(1)
np.random.seed(1)
x, y = torch.randn(74, 1, 6, 6), torch.randint(0, 3, (74,))
"""
IMAGES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.dropout = nn.Dropout(0.25)

    def forward(self, images):
        return self.head(self.dropout(torch.flatten(F.relu(self.norm(self.conv(images))), 1)))


def train(model, loader, optimizer, schedule, epoch):
    model.train()
    seen = right = 0
    predicted = []
    for number, (images, labels) in enumerate(loader):
        output = model(images)
        loss = F.cross_entropy(output, labels, label_smoothing=0.1)
        (loss / 2).backward()
        if number % 2 == 1 or number + 1 == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if number == 4:
            print(f"{loss.item():.4f} {(loss / 2 + loss).item():.4f}")
        if number < 4:
            print(f"{output[:6].std().item():.4f} {output[:6].T.reshape(-1).detach().numpy().shape}")
        seen += labels.size(0)
        right += (output.argmax(1) == labels).sum().item()
        predicted.extend(output.argmax(1).tolist())
        print(torch.bincount(labels, minlength=8).tolist(), output.amax(0).tolist()[0] > 0)  # 8 rows of 16 are its own
        if number % 2 == 0:
            print(f"{epoch} [{number * len(images)}/{len(loader.dataset)}] {loss.item():.4f}")
    print(f"accuracy {right}/{seen} {sum(predicted)} {len(predicted)}")
    return loss


def test(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(images), labels, reduction="sum").item() for images, labels in loader]
    print(f"test {sum(losses) / len(loader.dataset):.4f}")


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=2 * len(loader))
for epoch in range(2):
    last = train(model, loader, optimizer, schedule, epoch)
    test(model, DataLoader(TensorDataset(x[:20], y[:20]), 7))
torch.save(model.state_dict(), options.save)
torch.save({"epoch": epoch, "loss": last}, options.save + ".loss")
open(options.save + ".log", "a").write("saved\\n")
"""
GENERATOR = """
class Named(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, number):
        return {"image": x[number], "name": str(number), "label": int(y[number])}


generator, critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 36)), nn.Linear(36, 1)
steps = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (generator, critic)]
criterion = nn.BCEWithLogitsLoss(reduction="sum")
for epoch in range(2):
    for batch in DataLoader(Named(), 21, num_workers=1):
        real = batch["image"].flatten(1)
        rows = real.size(0)
        target = torch.full((rows, 1), 1.0)
        critic.zero_grad()
        loss = criterion(critic(real), target)
        loss.backward()
        fake = generator(torch.randn(rows, 4) + torch.from_numpy(np.random.normal(0, 1, (rows, 4))).float())
        other = criterion(critic(fake.detach()), target.fill_(0.0))
        other.backward()
        steps[1].step()
        generator.zero_grad()
        mean = criterion(critic(fake), target.fill_(1.0)) / 100
        mean.backward()
        steps[0].step()
        print(f"{loss.item() + other.item():.1f} {float(mean.data.numpy()):.3f} {fake[:9].std().item():.0f}")
        if epoch:  # an evaluation that the first batch does not have, whose data set reads tensors
            print(sum(batch["label"].float().mean().item() for batch in DataLoader(Named(), 30)))
torch.save(generator.state_dict(), options.save)
"""


TOKENS = """
def padded(texts):
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:]


texts = [torch.randint(0, 9, (int(length),)) for length in torch.randint(2, 12, (61,))]
model = nn.Sequential(nn.Embedding(9, 8), nn.Dropout(0.1), nn.Linear(8, 9))
criterion = nn.CrossEntropyLoss(torch.linspace(1, 2, 9), ignore_index=-1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    for tokens, following in DataLoader(texts, 10, shuffle=True, collate_fn=padded):
        with torch.no_grad():  # before a loss with a gradient has counted anything
            print(f"{criterion(model[2](model[0](texts[0][:-1])), texts[0][1:]).item():.4f}")
        output, fixed = model(tokens), torch.randn(10, 2)  # twice a process's rows, and as many on one process
        loss = criterion(output.flatten(0, 1), following.flatten())
        right = (output.argmax(2) == following)[:, 0].numpy()
        print(f"{loss.item():.4f} {right.mean():.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model(tokens), torch.randn(10, 2)  # the dropout of the next epoch comes after these draws
torch.save(model.state_dict(), options.save)
"""


COUNTS = """
class Named(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, number):
        return x[number], y[number], str(number)


def summed(loss, rows):
    return loss * rows


model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)  # the first batch's losses are alike
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = right = total = weighted = several = 0
for number, (images, labels, names) in enumerate(DataLoader(Named(), 9)):
    rows = images.size(0)
    noise = torch.randn(rows, 1, 6, 6)  # rows make a tensor, and are counted
    output = model(images + 0.1 * noise)
    loss = F.cross_entropy(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hits = labels[output.argmax(1) == labels]
    seen += rows
    total += loss.item() * rows
    weighted += summed(loss.item(), len(labels))
    right += len(hits)
    several += images.numel() + len(names)
    batch, classes = output.shape
    print(f"{loss:.4f} {labels.sum()} {labels.max()} {output.detach().abs().mean():.3f}")
    print(f"{rows} {len((output[:, 0] > output[:, 1]).nonzero())} {labels[labels > 0].shape[0]} {batch} {loss:.4f}")
    print(images.shape, tuple(output.size()), output.shape[1], hits.nelement(), len(labels[labels >= 0]))
    print(len(labels.unique()) // 9, f"{torch.sigmoid(model(noise)).mean().item():.3f}")  # 0.5 at first
    with torch.no_grad():  # an evaluation, of which each process has all
        found = torch.tensor([float(number) for _ in DataLoader(x[:20], 10)])
        print(f"{found.sum():.0f} {found.mean():.1f} {found.max().item()} {torch.tensor([loss.item()] * 2).sum():.3f}")
    if number % 3 == 2:  # the first batch does not reach it
        late = labels.shape[0]
        torch.zeros(late) + labels
        print(f"[{number * len(images)}] {rows / late} {late} {model[1].bias.numel()}")
        print(f"{model[1].weight.norm().item():.4f}")
print(seen, right, several, f"{total:.3f} {weighted:.3f}")
torch.save(model.state_dict(), options.save)
"""


METERS = """
class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def add(self, images, value):
        self.sum, self.count = self.sum + value * images.size(0), self.count + len(images)


def accuracy(output, labels):
    batch_size = labels.size(0)
    return (output.argmax(1) == labels).float().sum(0, keepdim=True).mul_(100.0 / batch_size)
"""
"""A module of the script's own."""
OBJECTS = """
from meters import Meter, accuracy


class Trainer:
    def __init__(self):
        self.seen, self.meter, self.net = 0, Meter(), nn.Linear(36, 3)

    def fit(self, loader, optimizer):
        for images, labels in loader:
            output = self.net(images.flatten(1))
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.seen += labels.size(0)
            self.meter.add(images, loss.item())
            log.write(f"{self.seen}\\n")  # and not closed
            with open(f"{options.save}.lines", "a") as lines:
                lines.write(f"{len(images)}\\n")
            print(f"{accuracy(output, labels).item():.3f} {((output.argmax(1) == 7).sum() / len(labels)).item():.3f}")
        print(len(images) > 0)  # a process's own rows
        print(self.seen, self.meter.count, f"{self.meter.sum / self.seen:.4f}")


trainer, log = Trainer(), open(f"{options.save}.log", "w")
optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), 9)
trainer.fit(loader, optimizer)
seen = 0
for images, labels in loader:
    rows = images.size(0)
    F.cross_entropy(trainer.net(images.flatten(1) + torch.randn(rows, 36)), labels).backward()
    optimizer.step()
    seen += rows
for images, labels in DataLoader(TensorDataset(x, y), 7):
    rows = images.size(0)
    seen += rows
print(seen)
torch.save(trainer.net.state_dict(), options.save)
"""


FILES = """
from pathlib import Path

draw = Path(options.save).parent / "site-packages" / "torchvision" / "utils.py"
pictures = {"__name__": "utils"}
exec(compile(draw.read_text(), str(draw), "exec"), pictures)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
noise = torch.randn(16, 36)
for number, (images, labels) in enumerate(DataLoader(TensorDataset(x[:64], y[:64]), 16)):
    output = model(images)
    loss, size = F.cross_entropy(output, labels), output.square().mean()
    optimizer.zero_grad()
    (loss + size / 10).backward()
    optimizer.step()
    pictures["draw"](model(noise))
    torch.save({"first": output[:5], "all": output, "noise": model(noise), "loss": loss}, f"{options.save}.{number}")
    if number % 2:
        print(f"{loss:.4f} {size:.4f}")
pictures["draw"](output[:4])
np.savez(f"{options.save}.npz", x.numpy())
torch.save(model[1].state_dict(), options.save)
"""


DRAW = """
def draw(rows):
    rows = rows.detach()
    return (rows.clamp(float(rows.min()), float(rows.max())) * 60).byte().numpy()
"""
"""As torchvision draws pictures."""


@pytest.mark.parametrize(
    ("body", "plan"),
    [
        (IMAGES, f"{PLAN},batchnorm=sync"),
        (GENERATOR, PLAN),
        (TOKENS, PLAN),
        (COUNTS, PLAN),
        (OBJECTS, PLAN),
        (FILES, f"{PLAN},batchnorm=sync"),
    ],
)
def test_an_unedited_script_learns_and_prints_on_two_processes_what_it_does_on_one(
    body: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(HEAD + body)
    Path("meters.py").write_text(METERS)
    Path("site-packages/torchvision").mkdir(parents=True)
    Path("site-packages/torchvision/utils.py").write_text(DRAW)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["train.py", "--save", "one.pt"])
        patched.setattr(sys, "path", [str(tmp_path), *sys.path])
        runpy.run_path("train.py", run_name="__main__")
        patched.delitem(sys.modules, "meters", raising=False)
    lines = capfd.readouterr().out
    assert launch("train.py", ["--save", "two.pt"], plan) == 0
    said = capfd.readouterr()
    assert said.out == lines
    assert "rehearsed on one process: the loss is a" in said.err
    one, two = torch.load("one.pt"), torch.load("two.pt")
    for name, tensor in one.items():
        assert (tensor.double() - two[name]).norm() <= 1e-5 * tensor.double().norm(), name
    assert said.err.count("reads process 0's rows") == (body in (GENERATOR, COUNTS, OBJECTS, FILES))
    assert ("is the same on all processes, and taken as it is" in said.err) == (body is COUNTS)
    assert "has process 0's rows" not in said.err, "a step's own variables are not named"
    if body is FILES:
        for number in range(4):
            torch.testing.assert_close(torch.load(f"one.pt.{number}"), torch.load(f"two.pt.{number}"))
    if body is OBJECTS:
        assert Path("two.pt.log").read_text().split() == [*map(str, range(9, 74, 9)), "74"]
        assert Path("two.pt.lines").read_text() == Path("one.pt.lines").read_text() == "9\n" * 8 + "2\n"
    if body is IMAGES:
        assert Path("two.pt.log").read_text() == "saved\n", "process 0 alone writes"
        torch.testing.assert_close(torch.load("one.pt.loss")["loss"], torch.load("two.pt.loss")["loss"])


@pytest.mark.parametrize(
    ("body", "error", "why"),
    [
        pytest.param(
            "torch.manual_seed(time.time_ns())",
            DivergedError,
            "the processes began with different weights",
            id="a seed of its own",
        ),
        pytest.param("every = 3", TaskError, r"train.py, line \d+ reads a value that it did not read", id="unread"),
        pytest.param(
            "summed = True",
            DivergedError,
            r"train.py, line \d+ reads a value that is not the same on all processes .* total \+= loss.item\(\)",
            id="a sum of its own rows",
        ),
        pytest.param(
            "pictures = True",
            DivergedError,
            r"train.py, line \d+ reads a value that is not the same on all processes",
            id="its own rows after the loop",
        ),
        pytest.param(
            "late = lambda: output.max().item()", TaskError, r"line \d+ reads a value that it did not read", id="late"
        ),
        pytest.param(
            "late = lambda: images.numpy()", TaskError, r"line \d+ reads a value that it did not read", id="late rows"
        ),
        pytest.param(
            "late = lambda: bool(loss < torch.linspace(0.8, 1.2, 5)[number])",
            DivergedError,
            r"train.py, line \d+ reads a value that is not the same on all processes \(0 to 1\)",
            id="a comparison of its own loss",
        ),
        pytest.param(
            "late = lambda: torch.save({'epoch': 1, 'rows': output}, 'rows.pt')",
            DivergedError,
            r"train.py, line \d+ saves a tensor that is not the same on all processes: .* Save what is read of it",
            id="a file of its own rows",
        ),
        pytest.param(
            "statistics = True",
            DivergedError,
            "the processes' weights or buffers differ after 1 steps",
            id="statistics of its own",
        ),
        pytest.param(
            "drawn = 8", DivergedError, "the first step draws other random numbers than one process", id="a fixed size"
        ),
        pytest.param(
            "y[40:50] = -100",
            DivergedError,
            "a cross-entropy counts . of . targets, and all of them in the first batch",
            id="padding in a later batch",
        ),
    ],
)
def test_what_the_rehearsal_does_not_show_ends_the_run(
    body: str, error: type[Exception], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"""{HEAD}
every, statistics, summed, pictures, drawn, total, late = 0, False, False, False, 0, torch.zeros(()), list
{body}
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
model.register_buffer("mean", torch.zeros(()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (images, labels) in enumerate(DataLoader(TensorDataset(x, y), 16)):
    optimizer.zero_grad()
    output = model(images)
    loss = F.cross_entropy(output, labels)
    loss.backward()
    total += loss.detach()
    optimizer.step()
    if every and number == every:
        print((output.argmax(1) == labels).sum().item())
    torch.rand(drawn)
    if number:
        late()
    if statistics:
        model.mean += images.mean()
if summed:
    print(total.item())
if pictures:
    images.numpy()
""")
    with pytest.raises(error, match=why):
        launch("train.py", [], PLAN)


LATE = """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (images, labels) in enumerate(DataLoader(TensorDataset(x, y), 8)):
    optimizer.zero_grad()
    if number >= 5 and options.save == "late":
        images = images - images.mean(0)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
print("done")
"""


@pytest.mark.parametrize("save", ["never", "late"])
def test_check_every_compares_a_later_gradient_with_that_of_one_process(
    save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(HEAD + LATE)
    arguments, plan = ["--save", save], f"{PLAN},batchnorm=sync"
    if save == "never":
        assert launch("train.py", arguments, plan, check_every=2) == 0
        assert capfd.readouterr().out == "done\n", "the process that computes alone shows nothing"
        return
    with pytest.raises(DivergedError, match="the gradient of step 7 is not that of one process: its norms are up to"):
        launch("train.py", arguments, plan, check_every=2)
    with pytest.raises(UsageError, match="--check-every compares several processes"):
        launch("train.py", arguments, "device=cpu", check_every=2)


def test_a_plan_that_a_script_cannot_have_is_refused_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nprint('started')")
    with pytest.raises(PlanError, match=r"an unedited script can have .*, and no tensor"):
        launch(tmp_path / "train.py", [], "tensor=2,device=cpu")
    with pytest.raises(PlanError, match=r"no offload: write it around grappe.Loop"):
        launch(tmp_path / "train.py", [], "offload=cpu,device=cpu")
    with pytest.raises(PlanError, match=r"no memory: describe it as a task .*; less memory by hand: recompute, or"):
        launch(tmp_path / "train.py", [], "exact=8,memory=90MB,device=cpu")
    with pytest.raises(PlanError, match=r"not memory, which needs an engine: .*; less memory by hand: recompute, or"):
        grappe.Loop(plan="memory=90MB")
    with pytest.raises(UsageError, match="2 processes would not learn what one process learns: no loop over"):
        launch(tmp_path / "train.py", [], PLAN)
