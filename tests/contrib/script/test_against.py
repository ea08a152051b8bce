"""grappe verify --against: a ported task learns what its script does, and a planted difference is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from grappe.contrib.script.against import Agreement, compare
from grappe.errors import UsageError
from grappe.training.task_reference import TaskReference
from tests.commands import GRAPPE, ran

SCRIPT = """\
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(8 * 36, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3)
    images, targets = torch.rand(96, 1, 8, 8, generator=generator), torch.randint(0, 10, (96,), generator=generator)
    images = (images - 0.5) / 0.25
    loader = DataLoader(TensorDataset(images, targets), batch_size=16, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, rho=0.8)
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        model.train()
        for n, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            print(epoch, loss.item())
        schedule.step()


main()
"""
TASK = """\
import torch
from torch import nn
from torch.nn import functional as F

import grappe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.25)
        )
        self.head = nn.Sequential(nn.Linear(8 * 36, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.head(self.features(x))


class Port(grappe.Task):
    epochs: int = 2
    batch_size: int = 16
    clip: float | None = 0.7

    def model(self):
        return Net()

    def data(self, split, folder):
        generator = torch.Generator().manual_seed(3)
        images, targets = torch.rand(96, 1, 8, 8, generator=generator), torch.randint(0, 10, (96,), generator=generator)
        return grappe.Arrays((images - 0.5) / 0.25, targets)

    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named):
        return torch.optim.Adadelta([p for _, p in named], lr=1.0, rho=0.8)

    def schedule(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7 ** (step // 6))
"""
STEPS = 8
NOT_JUDGED = "not judged, as its gradient is only rounding: features.0.bias"
TAKES_STEP = "            optimizer.step()\n"
CLIPS = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)\n"
RULE = "torch.optim.Adadelta(model.parameters(), lr=1.0, rho=0.8)"
UNCLIPPED = ("clip: float | None = 0.7", "clip: float | None = None")
NOTHING = ("", "")
GROUPS = (
    "[{'params': model.fc2.parameters(), 'lr': 0.1}, "
    "{'params': [p for n, p in model.named_parameters() if 'fc2' not in n]}]"
)
TWO = (
    "optimizer = torch.optim.Adadelta([p for n, p in model.named_parameters() if 'fc2' not in n], rho=0.8)\n"
    "    other = torch.optim.Adadelta(model.fc2.parameters(), lr=0.1, rho=0.8)"
)
STEPS_BOTH = f"{TAKES_STEP}            other.step()\n"
AUGMENTS = """    def augment(self, inputs, targets, keys):
        return inputs.flip(-1), targets

    def loss("""

Edit = tuple[str, str]


@pytest.fixture
def main_program() -> Iterator[None]:
    """A script that runs in this process leaves its own arguments, folder and main module."""
    arguments, folder, main = sys.argv, sys.path[0], sys.modules["__main__"]
    yield
    sys.argv, sys.path[0], sys.modules["__main__"] = arguments, folder, main


def compared(
    folder: Path, script: Edit, task: Edit, *more: Edit, tasks: Sequence[Edit] = (), steps: int = STEPS
) -> Agreement:
    texts = []
    for text, edits in ((SCRIPT, (script, *more)), (TASK, (task, *tasks))):
        edited = text
        for before, after in edits:
            assert before in edited
            edited = edited.replace(before, after) if before else edited
        texts.append(edited)
    for name, text in zip(("script.py", "port.py"), texts, strict=True):
        (folder / name).write_text(text)
    task_of_it = TaskReference.of(str(folder / "port.py"))
    return compare(task_of_it, folder, folder / "script.py", (), steps, None, folder)  # type: ignore[arg-type]


def test_a_port_learns_the_same_over_an_epochs_end(main_program: None, tmp_path: Path) -> None:
    """Dropout, batch normalisation, clipping and the schedule are those of the script, bit by bit or nearly."""
    found = compared(tmp_path, NOTHING, NOTHING)
    assert found.learns_the_same, found.difference
    assert (found.step, found.tensors, found.notes) == (STEPS, 11, (NOT_JUDGED,))
    assert found.largest < 1e-5


def test_several_optimizers_of_a_script_are_groups_of_the_tasks_one(main_program: None, tmp_path: Path) -> None:
    named = "[p for _, p in named]"
    groups = (
        "[{'params': [p for n, p in named if 'head.2' in n], 'lr': 0.1}, "
        "{'params': [p for n, p in named if 'head.2' not in n]}]"
    )
    zeroes = ("optimizer.zero_grad()", "model.zero_grad()")
    rates = ("        schedule.step()\n", "        schedule.step()\n        other.param_groups[0]['lr'] *= 0.7\n")
    task = (named, groups)
    found = compared(tmp_path, (f"optimizer = {RULE}", TWO), task, (TAKES_STEP, STEPS_BOTH), rates, zeroes)
    assert found.learns_the_same, found.difference
    assert (found.step, found.tensors) == (STEPS, 11)


def test_accumulated_batches_are_microbatches(main_program: None, tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        ("            optimizer.zero_grad()\n", "            if n % 2 == 0: optimizer.zero_grad()\n"),
        ("batch_size: int = 16", "batch_size: int = 32"),
        ("            loss.backward()\n", "            (loss / 2).backward()\n            if n % 2 == 0: continue\n"),
        ("        schedule.step()\n", ""),
        steps=2,
    )
    assert found.learns_the_same, found.difference
    assert found.notes[0] == "the script adds up 2 batches a step: as microbatches=2 does"


NAMES = (
    "            optimizer.zero_grad()\n",
    "            data, target = data['x'], data['y']\n            optimizer.zero_grad()\n",
)
NAMED = "collate_fn=lambda rows: dict(zip('yx', torch.utils.data.default_collate(rows)[::-1]))"
COLLATES = """    def collate(self, rows):
        inputs, targets = torch.utils.data.default_collate(rows)
        return {"x": inputs}, targets

    def loss("""
IN_ROWS = (
    "grappe.Arrays((images - 0.5) / 0.25, targets)",
    "torch.utils.data.TensorDataset((images - 0.5) / 0.25, targets)",
)


def test_a_batch_in_a_dict_is_paired_by_the_names_of_the_tasks_inputs(main_program: None, tmp_path: Path) -> None:
    script = (
        ("enumerate(loader)", "((n, (batch, 0)) for n, batch in enumerate(loader))"), NAMES,
        ("batch_size=16, ", f"batch_size=16, {NAMED}, "),
    )  # fmt: skip
    found = compared(tmp_path, script[0], NOTHING, *script[1:], tasks=(IN_ROWS, ("    def loss(", COLLATES)), steps=2)
    assert found.learns_the_same and found.step == 2, found.difference
    assert found.notes == (NOT_JUDGED,), "samples are compared, too"
    with pytest.raises(
        UsageError, match="batch is a dict of y, x, and no pair \\(inputs, targets\\): let the task's collate"
    ):
        compared(tmp_path, script[0], NOTHING, *script[1:])


DIFFERENCES: dict[str, tuple[Edit, Edit, str] | tuple[Edit, Edit, str, Edit]] = {
    "rate": (("lr=1.0", "lr=0.5"), NOTHING, "learning rate: 0.5 in the script, 1 in the task"),
    "a group's rate": (
        (RULE, RULE.replace("model.parameters()", GROUPS)), NOTHING,
        "learning rate: 0.1 in the script, 1 in the task, for head.2.weight",
    ),
    "one of two rates": (
        (f"optimizer = {RULE}", TWO), NOTHING,
        "learning rate: 0.1 in the script, 1 in the task, for head.2.weight",
        (TAKES_STEP, STEPS_BOTH),
    ),
    "setting": (("rho=0.8", "rho=0.9"), NOTHING, "optimizer's settings: rho=0.9 in the script, 0.8 in the task"),
    "weight decay": (("rho=0.8", "weight_decay=0.01, rho=0.8"), NOTHING, "optimizer's settings: weight_decay=0.01"),
    "rule": ((RULE, "torch.optim.SGD(model.parameters(), lr=1.0)"), NOTHING, "optimizer: SGD in the script, Adadelta"),
    "rhythm": (
        (TAKES_STEP, f"{TAKES_STEP}            schedule.step()\n"), NOTHING,
        "in both the step before: the schedule's rhythm",
    ),
    "no schedule": (("        schedule.step()\n", ""), NOTHING, "in both the step before: the schedule's rhythm"),
    "sum": (
        ("data), target)", "data), target, reduction='sum')"), NOTHING,
        "loss's scale: a sum over the 16 rows in the script",
    ),
    "other loss": (
        NOTHING, ('reduction="none"', 'reduction="none", label_smoothing=0.1'),
        "another loss, or its scale",
    ),
    "clips not": ((CLIPS, ""), NOTHING, "clipping: to the norm 0.7 in the task, not in the script"),
    "task clips not": (NOTHING, UNCLIPPED, "clipping: to the norm 0.7 in the script, not in the task"),
    "clips further": (
        (", 0.7)", ", 0.3)"), NOTHING,
        "clipping: to the norm 0.3 in the script, to the norm 0.7 in the task",
    ),
    "clips values": (
        ("clip_grad_norm_(model.parameters(), 0.7)", "clip_grad_value_(model.parameters(), 0.01)"), UNCLIPPED,
        "clipping: each value to 0.01 in the script, not in the task",
    ),
    "mode": (("model.train()", "model.eval()"), NOTHING, "mode: the script's model is in evaluation mode"),
    "dropout": (
        ("Dropout(0.25)", "Dropout(0.5)"), NOTHING,
        "model: dropout of [0.5] in the script, of [0.25] in the task",
    ),
    "activation": (NOTHING, ("16), nn.ReLU()", "16), nn.Tanh()"), "with the script's own model it is the same: layers"),
    "statistics": (
        ("BatchNorm2d(8)", "BatchNorm2d(8, momentum=0.3)"), NOTHING,
        "buffer: features.1.running_mean after the step",
    ),
    "width": (
        ("36, 16)\n        self.fc2 = nn.Linear(16", "36, 24)\n        self.fc2 = nn.Linear(24"), NOTHING,
        "parameters: the task has head.0.weight [16, 288], head.0.bias [16], head.2.weight [10, 16] alone; the script "
        "has fc1.weight [24",
    ),
    "initial weights": (
        ("    model = Net()\n", "    model = Net()\n    nn.init.normal_(model.fc1.weight, std=0.5)\n"), NOTHING,
        "initial weights: head.0.weight has the mean",
    ),
    "frozen": (
        ("    optimizer = ", "    model.conv1.requires_grad_(False)\n    optimizer = "), NOTHING,
        "features.0.weight has one in the task alone",
    ),
    "detached": (("fc1(x)", "fc1(x.detach())"), NOTHING, "features.0.weight has one in the task alone: detached"),
    "changed after the step": (
        (TAKES_STEP, f"{TAKES_STEP}            model.fc2.weight.data.mul_(0.99)\n"), NOTHING,
        "between two steps: the script changes it after the optimizer's step",
    ),
    "augmentation": (
        NOTHING, ("    def loss(", AUGMENTS),
        "augmentation: without the task's augment() it is the same",
    ),
    "batch size": (
        ("batch_size=16", "batch_size=8"), NOTHING,
        "batch size: 8 samples a step in the script, 16 in the task",
    ),
    "normalisation": (("images = (images - 0.5) / 0.25", "images = images + 0"), NOTHING, "normalised otherwise"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_planted_difference_is_named(main_program: None, tmp_path: Path, name: str) -> None:
    script, task, words, *more = DIFFERENCES[name]
    found = compared(tmp_path, script, task, *more)
    assert not found.learns_the_same
    assert words in found.difference


def test_other_samples_are_noted(main_program: None, tmp_path: Path) -> None:
    found = compared(tmp_path, ("manual_seed(3)", "manual_seed(4)"), NOTHING, steps=1)
    assert found.notes[0].startswith("16 of the 16 samples of the script's first batch are none of the task's training")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ((TAKES_STEP, "            (optimizer if n % 2 else other).step()\n"), "steps several optimizers in turns"),
        (("enumerate(loader)", "enumerate([(images, targets)])"), "nothing to compare"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(main_program: None, tmp_path: Path, edit: Edit, words: str) -> None:
    other = (f"optimizer = {RULE}", TWO.replace("lr=0.1, ", ""))
    with pytest.raises(UsageError, match=words):
        compared(tmp_path, other, NOTHING, edit)


@pytest.mark.slow
def test_the_command_gives_the_script_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "port.py").write_text(TASK)
    words = ("verify", "port.py", "--against", "script.py", "--epochs", "1")
    done = ran(GRAPPE, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("same: port.py learns what script.py does\n")
    assert "steps compared      6" in done.stdout
    assert "note: an epoch" not in done.stdout
