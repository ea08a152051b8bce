"""A multilayer perceptron as a task: wide matrices, small activations, Adam."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task


class Mlp(Task):
    """Random rows, random classes."""

    batch_size: int = 64
    width: int = 512

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)  # type: ignore[call-overload]

    def data(self, split: str, folder: Path) -> Arrays:
        # NumPy's memory, as a file's would be: what torch allocates is what a training needs.
        random = np.random.default_rng(0)
        rows, classes = random.standard_normal((512, self.width), np.float32), random.integers(0, 10, 512)
        return Arrays(torch.from_numpy(rows), torch.from_numpy(classes))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(named_parameters)
