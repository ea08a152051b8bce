"""A loss that compares all samples of a batch, as a task: two noisy views of each row, one encoder (SimCLR)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task


class Views(Task):
    """Chen et al. (2020), "A simple framework for contrastive learning of visual representations"."""

    whole_batch_loss = True
    batch_size: int = 128
    width: int = 256

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(self.width, 64))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)  # type: ignore[call-overload]

    def data(self, split: str, folder: Path) -> Arrays:
        # NumPy's memory, as a file's would be: what torch allocates is what a training needs.
        random = np.random.default_rng(0)
        rows = random.standard_normal((512, 1, self.width), np.float32)
        views = rows + 0.3 * random.standard_normal((512, 2, self.width), np.float32)
        return Arrays(torch.from_numpy(views), torch.from_numpy(np.arange(512)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        rows = F.normalize(output, dim=2).transpose(0, 1).reshape(-1, output.shape[2])
        logits = (rows @ rows.T / 0.5).fill_diagonal_(-torch.inf)
        other = torch.arange(len(rows), device=rows.device).roll(len(output))
        return F.cross_entropy(logits, other, reduction="none").view(2, -1).mean(0)

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(named_parameters)
