"""Small: the task whose weights `grappe doctor --gpu` compares to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.data.arrays import Arrays
from grappe.task import Task


class Small(Task):
    """Convolutions, a normalisation, dropout and an uneven last batch, on random images."""

    epochs: int = 1
    batch_size: int = 64
    clip: float | None = 1.0
    samples: int = 300

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(16 * 49, 32),
            nn.GELU(),
            nn.Linear(32, 10),
        )

    def data(self, split: str, folder: Path) -> Arrays:
        source = torch.Generator().manual_seed(5 if split == "train" else 6)
        images = torch.randn(self.samples, 3, 16, 16, generator=source)
        return Arrays(images, torch.randint(10, (self.samples,), generator=source))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)
