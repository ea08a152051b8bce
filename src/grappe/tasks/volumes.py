"""A 3D U-Net that finds balls in synthetic volumes, which may be too large for one process: see the plan key domain.

Shapes: B volumes of S voxels a side.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Task
from grappe.errors import TaskError

if TYPE_CHECKING:
    import torchmetrics

SPLITS = {"train": 1.0, "validation": 0.25, "test": 0.25}
"""Volumes of each split, of those of the training."""


class Balls(Dataset):
    """Volumes [1, S, S, S] of noise with a brighter ball, and which voxels are its: [S, S, S]; each from its number."""

    def __init__(self, split: str, number: int, size: int) -> None:
        self._split, self._number, self._size = list(SPLITS).index(split), number, size

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = np.random.default_rng((self._split, index))
        centre, radius = draw.uniform(0.25, 0.75, 3) * self._size, draw.uniform(0.1, 0.25) * self._size
        away = [(np.arange(self._size) - middle) ** 2 for middle in centre]
        inside = away[0][:, None, None] + away[1][:, None] + away[2] < radius**2
        volume = draw.standard_normal(inside.shape, np.float32) + 2 * inside.astype(np.float32)
        return torch.from_numpy(volume)[None], torch.from_numpy(inside.astype(np.int64))


def _block(before: int, after: int) -> nn.Sequential:
    # Where all of ReLU's outputs are 0, as in a ball, the head's bias alone learns: it takes hundreds of steps.
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv3d(channels, after, 3, padding=1), nn.GroupNorm(4, after), nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers)


class UNet3D(nn.Module):
    """Çiçek et al. (2016), "3D U-Net": three levels, group normalisation, [B, 1, S, S, S] to [B, 2, S, S, S]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(1, width), _block(width, 2 * width)])
        self.middle = _block(2 * width, 4 * width)
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(2 * n, n, 2, 2) for n in (2 * width, width))
        self.up = nn.ModuleList(_block(2 * n, n) for n in (2 * width, width))
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool3d(x, 2)
        x = self.middle(x)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat([kept.pop(), enlarge(x)], 1))
        return self.head(x)


class Volumes(Task):
    """A 3D U-Net on synthetic volumes; needs no download."""

    epochs: int = 4
    batch_size: int = 2
    lr: float = 3e-3
    size: int = 32
    """Voxels a side, a multiple of 4."""
    width: int = 8
    """Channels of the finest level, a multiple of 4."""
    volumes: int = 32

    def model(self) -> nn.Module:
        if self.size % 4 or self.width % 4:
            raise TaskError(f"size={self.size} and width={self.width}: take multiples of 4")
        return UNet3D(self.width)

    def data(self, split: str, folder: Path) -> Balls:
        return Balls(split, max(1, int(self.volumes * SPLITS[split])), self.size)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):  # noqa: ANN001, ANN201
        return torch.optim.Adam(named_parameters, lr=self.lr)

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        from torchmetrics.classification import MulticlassJaccardIndex  # takes seconds, in evaluations alone

        return {"overlap": MulticlassJaccardIndex(2)}

    def units(self, model: Any) -> list[nn.Module]:
        return [*model.down, model.middle, *model.up]
