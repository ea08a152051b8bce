"""LeNet on Fashion-MNIST, as the multi-GPU chapter of Dive into Deep Learning trains it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from grappe import Arrays, Download, normalise
from grappe.data.formats import locate, mnist
from grappe.errors import TaskError
from grappe.optimizers.common import LrScaling, warmed_up
from grappe.tasks.digits import Digits

SOURCE = "https://github.com/zalandoresearch/fashion-mnist (about 30 MB)"
LARGEST = 60_000  # images
PLACES = ("", "FashionMNIST/raw", "fashion_mnist")  # below the data folder; the second is torchvision's
FILES = tuple(
    Download(
        url=f"https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{name}-ubyte.gz",
        size=size,
        sha256=sha256,
        folder="fashion_mnist",
    )
    for name, size, sha256 in (
        ("train-images-idx3", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    )
)


def lenet() -> nn.Sequential:
    """Makes the chapter's `lenet`, for 28 x 28 images, with the chapter's initialisation."""
    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.01)
        else:
            nn.init.zeros_(parameter)
    return network


class FashionMnist(Digits):
    """LeNet on Fashion-MNIST; the last twelfth of the training images is kept for validation."""

    downloads: ClassVar[tuple[Download, ...]] = FILES
    epochs: int = 10
    batch_size: int = 256
    lr: float = 0.2
    momentum: float = 0.0
    lr_scaling: LrScaling = "none"
    """Rule for lr when batch_size is k times 256: linear (k times lr) or sqrt; warmed up over a tenth of the steps."""
    holdout: float = 1 / 12
    """The last share of the training images, kept for validation. With 0, as in the book, the test images are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.holdout < 1:
            raise TaskError(f"holdout={self.holdout}: it is a share, from 0 to 1")

    @property
    def validated_on(self) -> str:
        return "validation" if self.holdout else "test"

    def model(self) -> nn.Module:
        return lenet()

    def data(self, split: str, folder: Path) -> Arrays:
        return idx_files(split, folder, PLACES, SOURCE, "fashion_mnist", self.holdout)

    def fake_data(self, split: str) -> Arrays:
        held = round(LARGEST * self.holdout)
        count = LARGEST - held if split == "train" else held or 10_000
        images, labels = torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros((), dtype=torch.long)
        return Arrays(images.expand(count, 1, 28, 28), labels.expand(count), transform=normalise((0.0,), (1.0,)))

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int):  # noqa: ANN201
        return warmed_up(optimizer, None, factor=self._factor, steps=total_steps // 10)


def idx_files(split: str, folder: Path, places: Sequence[str], source: str, task: str, holdout: float) -> Arrays:
    """Reads a split of MNIST or one of its successors: the last share of the training images is validation's."""
    test = split == "test" or (split == "validation" and holdout == 0)
    part = "t10k" if test else "train"
    names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    paths = locate(names, folder, places, source, endings=("", ".gz"), task=task)
    images, labels = mnist(*paths, most=LARGEST)
    cut = len(labels) - round(len(labels) * holdout)  # 55,000 of 60,000
    rows = slice(None) if test else {"train": slice(cut), "validation": slice(cut, None)}[split]
    return Arrays(images[rows], labels[rows], transform=normalise((0.0,), (1.0,)))
