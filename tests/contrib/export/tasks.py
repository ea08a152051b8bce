"""Small tasks that exports are tested with: each has something that a wrong export would get wrong."""

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task, normalise


class Linear(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Plain(Task):
    """A linear model of four numbers; the base of the others."""

    epochs: int = 1
    batch_size: int = 12
    network: ClassVar[type[nn.Module]] = Linear

    def model(self) -> nn.Module:
        return self.network()

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        return Arrays(torch.randn(29, 4, generator=generator), torch.arange(29) % 3)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


class Looking(Linear):
    """Looks at values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return -self.layer(x)


class Fixed(Linear):
    """Takes batches up to a size."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.shape[0] < 50 else -self.layer(x)


class Numpy(Linear):
    """Leaves torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.layer(x).numpy())


class Coupled(Linear):
    """Couples the samples of a batch, which torch.export does not mind."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + x.mean())


class LooksAtValues(Plain):
    """Refused."""

    network = Looking


class FixesTheBatch(Plain):
    """Refused."""

    network = Fixed


class LeavesTorch(Plain):
    """Refused."""

    network = Numpy


class Couples(Plain):
    """Found out by the proof."""

    network = Coupled


class TiedModel(nn.Module):
    """Weights that are used twice, and buffers that a checkpoint must bring: one of them is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.stem(images).mean((2, 3))
        return self.head(self.second(self.first(x).tanh())) * (1 + self.seen)


class Tied(Plain):
    """Images of bytes, normalised by the data; tied weights, batch normalisation, predictions of three kinds."""

    network = TiedModel

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(5)
        images = torch.randint(0, 256, (29, 3, 8, 8), generator=generator, dtype=torch.uint8)
        return Arrays(images, torch.arange(29) % 5, transform=normalise((0.4, 0.5, 0.6), (0.2,) * 3))

    def prediction(self, output: Tensor):
        chances = output.softmax(1)
        return {"class": chances.argmax(1), "chances": chances, "sure": chances.amax(1) > 0.5}


class Centred(nn.Module):
    """Couples the samples of a batch, as batch normalisation in training does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.1 * x.mean(0)


class TwoWays(nn.Module):
    """Does something else while torch traces it, as code for exports in models does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.001 if torch.compiler.is_compiling() else x


class Layered(Plain):
    """A layer of choice between two others."""

    middle: str = "Centred"

    def model(self) -> nn.Module:
        middle = {"Centred": Centred, "TwoWays": TwoWays, "BatchNorm1d": lambda: nn.BatchNorm1d(5)}[self.middle]()
        return nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), middle), nn.Linear(5, 3))
