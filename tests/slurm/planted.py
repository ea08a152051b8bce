"""A task whose step takes time for each process and time for each sample, so that its efficiency is known."""

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from grappe import Task


class Points(Dataset):
    """64 points, given one by one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(3.0) / 96 + index / 64, index % 2


class Planted(Task):
    """Two classes of 64 points."""

    epochs: int = 100
    batch_size: int = 8
    fixed: float = 0.5
    """Seconds of a step, whatever its samples."""
    shared: float = 0.25
    """Seconds of a sample."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, split: str, folder: Path) -> Points:
        return Points()

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(self.fixed + self.shared * len(target))
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)
