"""Tasks that stand still, each somewhere else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from grappe import Arrays, Task


class Quick(Task):
    """Steps of a hundredth of a second, that say in which process they are."""

    epochs: int = 100_000
    batch_size: int = 4
    pause: float = 0.01

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, split: str, folder: Path) -> Dataset:
        return Arrays(torch.arange(96.0).view(32, 3) / 96, torch.arange(32) % 2)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        print(f"step in {os.getpid()}", flush=True)
        time.sleep(self.pause)
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


class Sleeper(Dataset):
    """Its sample 13 never comes."""

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
