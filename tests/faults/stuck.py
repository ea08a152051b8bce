"""Tasks that stand still, each somewhere else."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from grappe import Arrays, Task


class Layer(nn.Linear):
    """Says in which process it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            print(f"step in {os.getpid()}", flush=True)
        return super().forward(x)


class Quick(Task):
    """Steps of a hundredth of a second, by two units."""

    epochs: int = 100_000
    batch_size: int = 4
    pause: float = 0.01

    def model(self) -> nn.Module:
        return nn.Sequential(Layer(3, 4), Layer(4, 2))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def data(self, split: str, folder: Path) -> Dataset:
        return Arrays(torch.arange(96.0).view(32, 3) / 96, torch.arange(32) % 2)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


class Sleeper(Dataset):
    """Dataset whose sample 13 never comes."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        while index == 13:
            time.sleep(3600)
        return torch.full((3,), index / 32), index % 2


class Sleepy(Quick):
    """A dataset that sleeps for ever, on the one process that is given sample 13."""

    def data(self, split: str, folder: Path) -> Dataset:
        return Sleeper() if split == "train" else super().data(split, folder)


class SlowEvaluation(Quick):
    """Each evaluated batch takes a hundred times as long as a step."""

    epochs: int = 2

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0 if output.requires_grad else 1.0)
        return super().loss(output, target)
