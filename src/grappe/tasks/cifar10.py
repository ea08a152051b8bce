"""CIFAR-10 with the small network of the Alliance's PyTorch page, or with a ResNet-18."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Download, Task, normalise
from grappe.data.augment import flip, mixup, pad_and_crop
from grappe.data.formats import cifar10_binary, cifar10_python, locate
from grappe.errors import TaskError
from grappe.optimizers.common import LrScaling, scale_factor, warmed_up
from grappe.tasks.images.resnet import convolution, resnet

if TYPE_CHECKING:
    import torchmetrics
    from torch.distributed.tensor.parallel import ParallelStyle

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html (the Python or the binary version, about 165 MB)"
PLACES = ("", "cifar-10-batches-bin", "cifar-10-batches-py")  # below the data folder
ARCHIVE = Download(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    members={
        f"cifar-10-batches-bin/{name}.bin": 30_730_000
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    },
)


class Small(nn.Sequential):
    """The network `Net` of the page's cifar10-cpu.py."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
            nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, 10),
        )


class Cifar10(Task):
    """CIFAR-10 with a small network, or a ResNet-18 (try momentum=0.9 weight_decay=5e-4 flip_and_crop)."""

    downloads: ClassVar[tuple[Download, ...]] = (ARCHIVE,)
    epochs: int = 10
    batch_size: int = 512
    optimizer_: Literal["sgd", "adam"] = "sgd"
    """The page's scripts with Lightning and DeepSpeed have Adam (try lr=0.001), the others SGD."""
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_scaling: LrScaling = "none"
    """Rule for lr when batch_size is k times 512: linear (k times lr) or sqrt; warmed up over a tenth of the steps."""
    network: Literal["small", "resnet18"] = "small"
    flip_and_crop: bool = False
    mixup: float = 0.0
    """Maximal weight of another image in one, 0 to 1. 1 is "mixup" (Zhang et al. 2018) with alpha=1."""
    holdout: float = 0.1
    """The last share of the training images, kept for validation. With 0, the test images are validation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.mixup <= 1 and 0 <= self.holdout < 1):
            raise TaskError(f"mixup={self.mixup},holdout={self.holdout}: both are shares, from 0 to 1")
        if self.optimizer_ == "adam" and self.momentum:
            raise TaskError(f"momentum={self.momentum} is of optimizer=sgd: Adam has its betas, so leave it out")

    @property
    def validated_on(self) -> str:
        return "validation" if self.holdout else "test"

    def model(self) -> nn.Module:
        if self.network == "small":
            return Small()
        # He et al. (2015), "Deep residual learning", for 32 x 32 images: 3 x 3 stem, no pooling.
        return resnet(18, 10, nn.Sequential(*convolution(3, 64, 3, 1), nn.ReLU()))

    def data(self, split: str, folder: Path) -> Arrays:
        test = split == "test" or (split == "validation" and self.holdout == 0)
        names = ["test_batch"] if test else [f"data_batch_{number}" for number in range(1, 6)]
        paths = locate(names, folder, PLACES, SOURCE, endings=(".bin", ""), task="cifar10")
        images, labels = (cifar10_binary if paths[0].suffix == ".bin" else cifar10_python)(paths)
        cut = len(labels) - round(len(labels) * self.holdout)
        rows = slice(None) if test else {"train": slice(cut), "validation": slice(cut, None)}[split]
        return Arrays(images[rows], labels[rows], transform=normalise((0.5,) * 3, (0.5,) * 3))

    def fake_data(self, split: str) -> Arrays:
        held = round(50_000 * self.holdout)
        count = 50_000 - held if split == "train" else held or 10_000
        images, labels = torch.zeros(3, 32, 32, dtype=torch.uint8), torch.zeros((), dtype=torch.long)
        images, labels = images.expand(count, 3, 32, 32), labels.expand(count)
        return Arrays(images, labels, transform=normalise((0.5,) * 3, (0.5,) * 3))

    def augment(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.flip_and_crop:  # padded with 0, which is grey: the images are normalised by now
            inputs = pad_and_crop(flip(inputs, keys), keys)
        return mixup(inputs, targets, keys, 10, most=self.mixup) if self.mixup else (inputs, targets)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):  # noqa: ANN001, ANN201
        options: dict[str, Any] = {"lr": self.lr * self._factor, "weight_decay": self.weight_decay}
        if self.optimizer_ == "adam":
            return torch.optim.Adam(named_parameters, **options)
        return torch.optim.SGD(named_parameters, momentum=self.momentum, **options)

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int):  # noqa: ANN201
        schedule = None  # the page's rate is constant
        if self.network != "small":
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
        return warmed_up(optimizer, schedule, factor=self._factor, steps=total_steps // 10)

    @property
    def _factor(self) -> float:
        return scale_factor(self.lr_scaling, batch_size=self.batch_size, base=type(self).batch_size)

    def prediction(self, output: Tensor) -> dict[str, Tensor]:
        probability, number = output.softmax(1).max(1)
        return {"class": number, "probability": probability}

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        from grappe.tasks.images.accuracy import Accuracy  # torchmetrics takes seconds, in evaluations alone

        return {"accuracy": Accuracy(10)}

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)

    def tensor_plan(self, model: Any) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from grappe.parallel.tensor import split_convolutions

        matrices = {"2.1": ColwiseParallel(), "3.0": RowwiseParallel()} if self.network == "small" else {}
        return {**split_convolutions(model), **matrices}
