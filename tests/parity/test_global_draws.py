"""Draws from Python's and NumPy's generators in forward and collate(), and those of an evaluation."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Task
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

STEPS = 4


class Branching(nn.Module):
    """Stochastic depth by Python, a factor by NumPy, noise by torch; in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        features = inputs + self.first(inputs) if random.random() < 0.5 else inputs
        return self.last(features + torch.randn_like(features)) * np.random.uniform(0.5, 1.5)


class Drawing(Task):
    epochs: int = 3
    batch_size: int = 7

    def model(self) -> nn.Module:
        return Branching()

    def data(self, split: str, folder: Path) -> Any:
        generator = torch.Generator().manual_seed(5)
        return [(torch.randn(6, generator=generator), number % 3) for number in range(17)]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


class Mixing(Drawing):
    """Mixes the samples of a batch."""

    def collate(self, samples: Sequence[Any]) -> Any:
        inputs, targets = (
            torch.stack([sample for sample, _ in samples]),
            torch.tensor([target for _, target in samples]),
        )
        share = np.random.beta(2, 2)
        order = random.sample(range(len(samples)), len(samples))
        return share * inputs + (1 - share) * inputs[torch.tensor(order)] + 0.1 * torch.randn(inputs.shape), targets


def trained(pool: Pool, task: Task, plan: str, processes: int) -> dict[str, Any]:
    return pool.run("tests.parity.cell:train", processes, task, plan, STEPS)[0]


@pytest.mark.parametrize(
    ("task", "plan", "processes"),
    [
        (Drawing(), "microbatches=3", 1),
        (Drawing(), "replicate=2", 2),
        (Drawing(), "replicate=3", 3),
        (Drawing(), "shard=2", 2),
        (Drawing(), "engine=textbook,replicate=2", 2),
        (Mixing(), "prefetch=3", 1),
        (Mixing(), "domain=2,cut=batch", 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Task) else str(value),
)
def test_they_are_one_processs(pool: Pool, task: Task, plan: str, processes: int) -> None:
    alone, spread = trained(pool, task, "", 1), trained(pool, task, plan, processes)
    gap, name = difference(alone["weights"], spread["weights"])
    assert gap < TOLERANCE, name
    if "microbatches" not in plan:  # which draw otherwise in an evaluation
        assert spread["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-5)
