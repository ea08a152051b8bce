"""LeNet on scikit-learn's 1,797 handwritten digits: real data on every machine, trained in seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from grappe import Arrays, Task
from grappe.errors import TaskError
from grappe.optimizers.common import LrScaling, scale_factor, warmed_up

if TYPE_CHECKING:
    import torchmetrics
    from torch.distributed.tensor.parallel import ParallelStyle


class LeNet(nn.Sequential):
    """LeCun et al. (1998), "Gradient-based learning applied to document recognition", for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU()),
            nn.Linear(128, 10),
        )


class Digits(Task):
    """LeNet on scikit-learn's handwritten digits; needs no download."""

    epochs: int = 10
    batch_size: int = 64
    lr: float = 0.1
    momentum: float = 0.9
    lr_scaling: LrScaling = "none"
    """Rule for lr when batch_size is k times 64: linear (k times lr) or sqrt; warmed up over a tenth of the steps."""

    def model(self) -> nn.Module:
        return LeNet()

    def data(self, split: str, folder: Path) -> Arrays:
        rows = _images_and_numbers()
        # Of ten images one is for validation and one for the test: the writers are mixed throughout the file.
        place = np.arange(len(rows)) % 10
        rows = rows[{"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]]
        images = (rows[:, :-1].reshape(-1, 1, 8, 8) * 16 - 0.5).clip(0, 255).astype(np.uint8)  # 0..16 to a byte
        return Arrays(images, rows[:, -1].astype(int), transform=lambda x: x.float().div_(128).sub_(1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):  # noqa: ANN001, ANN201
        return torch.optim.SGD(named_parameters, lr=self.lr * self._factor, momentum=self.momentum)

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int):  # noqa: ANN201
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
        return warmed_up(optimizer, cosine, factor=self._factor, steps=total_steps // 10)

    @property
    def _factor(self) -> float:
        return scale_factor(self.lr_scaling, batch_size=self.batch_size, base=type(self).batch_size)

    def prediction(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        probability, number = output.softmax(1).max(1)
        return {"class": number, "probability": probability}

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        from torchmetrics.classification import MulticlassAccuracy  # takes seconds, in evaluations alone

        return {"accuracy": MulticlassAccuracy(10, average="micro")}

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)

    def tensor_plan(self, model: Any) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from grappe.parallel.tensor import split_convolutions

        return {**split_convolutions(model), "2.1": ColwiseParallel(), "3": RowwiseParallel()}


def _images_and_numbers() -> np.ndarray:
    """Returns a row of 64 pixels and the number for each image; scikit-learn's import alone takes a second."""
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TaskError("the digits ship with scikit-learn: pip install 'grappe[demo]'") from None
    bunch: Any = load_digits()
    return np.column_stack([bunch.data, bunch.target])
