"""Faults planted in a task, which begin at some step: the check of that step, or a later one, says so."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Task
from tests.faults import resuming
from tests.processes import Pool

WITHIN = 250  # steps


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fresh() -> torch.Generator:
    return torch.Generator().manual_seed(1000 + rank())


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of the batch": lambda x: x - x.mean(0),
    "deviation of the batch": lambda x: x / (x.std(0) + 0.1),
    "largest of the batch": lambda x: x / x.abs().max(),
    "norm of the batch": lambda x: x / x.norm(),
    "quantile of the batch": lambda x: x.clamp(max=float(x.quantile(0.7))),
    "batch normalisation by a function": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax over the batch": lambda x: 9 * x.softmax(0),
    "order in the batch": lambda x: x + x.argsort(0).float(),
    "sums along the batch": lambda x: x + 0.1 * x.cumsum(0),
    "neighbours in the batch": lambda x: x + 0.5 * x.roll(1, 0),
    "first row left out": lambda x: x * (torch.arange(len(x)) > 0)[:, None],
    "rows by their place": lambda x: x * torch.linspace(0.5, 1.5, len(x))[:, None],
    "number of rows": lambda x: x * len(x) / 16,
    "branch by the number of rows": lambda x: x if len(x) > 8 else -x,
    "attention over the batch": lambda x: (x @ x.T / 4).softmax(1) @ x,
    "noise by a generator of each process": lambda x: x + torch.randn(x.shape, generator=fresh()),
    "dropout by a generator of each process": lambda x: x * (torch.rand(x.shape, generator=fresh()) < 0.5),
    "order by a generator of each process": lambda x: x[torch.randperm(len(x), generator=fresh())],
    "gradient by rank": lambda x: _Scaled.apply(x, 1.0 + rank()),
    "gradient left out by rank": lambda x: x.detach() if rank() else x,
    "number by rank": lambda x: x + rank(),
    "a distance to the batch's middle": lambda x: x - x.median(0).values,
}
LOSS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "loss by the number of rows": lambda losses, output, target: losses * len(losses) / 16,
    "loss by rank": lambda losses, output, target: losses * (1 + rank()),
    "mean of those that count": lambda losses, output, target: losses * 8 / (target > 0).sum().clamp(min=1),
    "hardest of the batch": lambda losses, output, target: losses * (losses >= losses.topk(3).values.min()),
    "weights by the batch's classes": lambda losses, output, target: losses / target.bincount(minlength=3)[target],
    "a term of the batch": lambda losses, output, target: losses + output.var(0).sum(),
    "a broadcast": lambda losses, output, target: (output[:, :1] - target).square().mean(1),
    "comparison in the batch": lambda losses, output, target: losses + (output @ output.T).square().mean(1),
    "targets of neighbours": lambda losses, output, target: F.cross_entropy(output, target.roll(1), reduction="none"),
    "loss left out by rank": lambda losses, output, target: losses * (1 - 0.5 * rank()),
}
KEPT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a centre in a buffer": lambda kept, x: x - kept.centre,
    "a centre in an attribute": lambda kept, x: x - kept.hidden,
    "a queue": lambda kept, x: x + (x @ kept.queue.clone().T).softmax(1) @ kept.queue.clone(),
    "a running deviation": lambda kept, x: x / (kept.spread + 0.1),
    "a count of rows": lambda kept, x: x * kept.rows,
    "the last batch's mean": lambda kept, x: x + kept.last,
    "the last batch's largest": lambda kept, x: x.clamp(max=float(kept.last.max()) + 1),
    "a moving scale": lambda kept, x: x * kept.scale,
}


class Keeps(nn.Module):
    """State of many kinds, which is used from some step on."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {
            "centre": torch.zeros(4), "spread": torch.ones(4), "queue": torch.zeros(6, 4), "rows": torch.ones(()),
            "last": torch.zeros(4), "scale": torch.ones(()), "steps": torch.zeros(()),
        }.items():  # fmt: skip
            self.register_buffer(name, value)
        self.hidden = torch.zeros(4)

    def note(self, kind: str, x: Tensor) -> None:
        """Takes a batch into the kind's own state alone."""
        mean = x.detach().mean(0)
        if "buffer" in kind:
            self.centre = 0.9 * self.centre + 0.1 * mean
        elif "attribute" in kind:
            self.hidden = 0.9 * self.hidden + 0.1 * mean
        elif "queue" in kind:
            self.queue = torch.cat([x.detach(), self.queue])[:6]
        elif "deviation" in kind:
            self.spread = 0.9 * self.spread + 0.1 * x.detach().std(0)
        elif "count" in kind:
            self.rows = 0.9 * self.rows + 0.1 * len(x) / 16
        elif "last" in kind:
            self.last = mean
        elif "scale" in kind:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()


class Faulty(nn.Module):
    """Two layers; from step `begins` on, the fault is between them."""

    def __init__(self, kind: str, begins: int) -> None:
        super().__init__()
        self.kind, self.begins = kind, begins
        self.first, self.last, self.kept = nn.Linear(4, 4), nn.Linear(4, 3), Keeps()

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs)
        if self.training:
            self.kept.steps += 1
        if int(self.kept.steps) >= self.begins and self.kind in FORWARD:
            features = FORWARD[self.kind](features)
        elif int(self.kept.steps) >= self.begins and self.kind in KEPT:
            features = KEPT[self.kind](self.kept, features)
            if self.training:
                self.kept.note(self.kind, features)
        return self.last(features)


class Planted(Task):
    """160 samples of three classes, in batches of 16."""

    epochs: int = 100
    batch_size: int = 16
    kind: str = ""
    begins: int = 1

    def model(self) -> nn.Module:
        return Faulty(self.kind, self.begins)

    def data(self, split: str, folder: Path) -> Any:
        generator = torch.Generator().manual_seed(4)
        inputs = torch.randn(160, 4, generator=generator)
        return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

    def forward(self, model: Any, inputs: Tensor) -> Any:
        return model(inputs), model.kept.steps.clone()

    def loss(self, output: Any, target: Tensor) -> Tensor:
        scores, steps = output
        losses = F.cross_entropy(scores, target, reduction="none")
        is_on = self.kind in LOSS and int(steps) >= self.begins and losses.requires_grad
        return LOSS[self.kind](losses, scores, target) if is_on else losses

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.02)


ALL = [*FORWARD, *LOSS, *KEPT]


def said(pool: Pool, kind: str, begins: int, folder: Path, steps: int) -> str:
    task = Planted(kind=kind, begins=begins, seed=ALL.index(kind) + 1 if kind else 0)
    return resuming.run(pool, task, "replicate=2", folder / "run", steps=steps, evaluate_every=10_000)


@pytest.mark.parametrize("kind", ALL)
def test_a_fault_of_the_first_step_is_said(pool: Pool, kind: str, tmp_path: Path) -> None:
    text = said(pool, kind, 1, tmp_path, 2)
    assert re.search(r"^its first step is not one process's: ", text, re.M)


@pytest.mark.parametrize("kind", ALL)
def test_a_fault_of_a_later_step_is_said_soon(pool: Pool, kind: str, tmp_path: Path) -> None:
    begins = torch.randint(2, 301, (), generator=torch.Generator().manual_seed(ALL.index(kind))).item()
    text = said(pool, kind, int(begins), tmp_path, int(begins) + WITHIN)
    assert "checked: one process's first step" in text
    step = re.search(r"^step (\d+) is not one process's: ", text, re.M)
    assert step
    assert begins <= int(step[1]) <= begins + WITHIN


def test_without_a_fault_nothing_is_said(pool: Pool, tmp_path: Path) -> None:
    assert "is not one process's" not in said(pool, "", 1, tmp_path, 600)
