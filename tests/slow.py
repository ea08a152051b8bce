"""A task whose steps take as long as one likes, and say in which process they are."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from grappe import Task

MARK = "SLOW_MARK"  # the variable that names a file to touch while it evaluates


class Points(Dataset):
    """32 points, given one by one so that data workers have something to do."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(3.0) / 96 + index / 32, index % 2


class Slow(Task):
    """Two classes of 32 points."""

    epochs: int = 100
    batch_size: int = 4
    pause: float = 0.05
    """Seconds that each step takes."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, split: str, folder: Path) -> Points:
        return Points()

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if MARK in os.environ and not torch.is_grad_enabled():
            Path(os.environ[MARK]).touch()
        print(f"step in {os.getpid()}", flush=True)
        time.sleep(self.pause)
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)
