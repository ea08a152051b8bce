"""A task whose parameters DeepSpeed puts on a disk: what is below a megabyte it leaves in memory."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from grappe import Arrays, Task


class Wide(Task):
    """Layers of `width` x `width`, all alike, and their sum of squares."""

    epochs: int = 3
    batch_size: int = 6
    width: int = 768
    depth: int = 2
    samples: int = 11

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.depth)))

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(9)
        numbers = torch.randn(self.samples, self.width, generator=generator)
        return Arrays(numbers, torch.randint(0, 5, (self.samples,), generator=generator))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=0.0001)

    def units(self, model: nn.Sequential) -> list[nn.Module]:
        return list(model)
