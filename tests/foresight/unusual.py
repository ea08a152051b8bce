"""Tasks that are harder to trace than most: what a user may write."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.tasks.pysource import PySource

WIDTH = 128


class Rows(Task):
    """Random rows in NumPy's memory, which torch's allocator does not count."""

    batch_size: int = 64

    def model(self) -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def data(self, split: str, folder: Path) -> Any:
        rows = np.random.default_rng(0).standard_normal((256, WIDTH), np.float32)
        return Arrays(torch.from_numpy(rows), torch.from_numpy(np.zeros(256, dtype=np.int64)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named_parameters)


class Tied(Rows):
    """The first and the last unit share their matrix."""

    def model(self) -> nn.Module:
        model = super().model()
        model[2][0].weight = model[0][0].weight  # type: ignore[index,union-attr]
        return model


class Neighbours(Rows):
    """The last two units share their matrix."""

    def model(self) -> nn.Module:
        model = super().model()
        model[2][0].weight = model[1][0].weight  # type: ignore[index,union-attr]
        return model


class Common(Rows):
    """The first and the last unit have the same module."""

    def model(self) -> nn.Module:
        model = super().model()
        model[2][0] = model[0][0]  # type: ignore[index]
        return model


class Repeated(Rows):
    """One unit is listed, and called, three times."""

    def model(self) -> nn.Module:
        model = super().model()
        model[2] = model[1] = model[0]  # type: ignore[index]
        return model

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [model[number] for number in range(3)]  # type: ignore[index]


class Cube(torch.autograd.Function):
    """Keeps two tensors, and makes a third in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return gradients[0] * (2 * square + x * x)


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(torch.tanh(self.linear(x)))


class Custom(Rows):
    """Autograd functions of its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(*[Cubed() for _ in range(3)])


class Loop(nn.Module):
    """A unit that is called twice, and another between."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.once(self.twice(x)))


class Twice(Rows):
    """A unit that is called twice."""

    def model(self) -> nn.Module:
        return Loop()


class Read(nn.Module):
    """Token ids to logits, with one matrix for both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 500, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(self.embedding(ids)))).transpose(1, 2)


class Sentences(torch.utils.data.Dataset):
    """Of 3 to 10 tokens, and some of 40: every second one, or those of `long`."""

    def __init__(self, long: frozenset[int] | None = None) -> None:
        self._long = frozenset(range(1, 256, 2)) if long is None else long

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(40 if index in self._long else 3 + index % 8, index, dtype=np.int64), 0


class Ragged(Rows):
    """Samples of different lengths, which collate pads to the longest; embedding and output are tied."""

    def model(self) -> nn.Module:
        return Read()

    def units(self, model: Any) -> list[nn.Module]:
        return [model.inner]

    def data(self, split: str, folder: Path) -> Any:
        return Sentences()

    def collate(self, samples: Any) -> tuple[Tensor, Tensor]:
        longest = max(len(ids) for ids, _ in samples)
        padded = torch.from_numpy(np.stack([np.pad(ids, (0, longest - len(ids))) for ids, _ in samples]))
        return padded, padded.clone()


class Chosen(Rows):
    """A shape that depends on data."""

    def model(self) -> nn.Module:
        class Choosing(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x[x[:, 0] > 0])

        return Choosing(WIDTH, WIDTH)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return []


class Numpy(Chosen):
    """A model that leaves torch, which no tensor without memory can."""

    def model(self) -> nn.Module:
        class Leaving(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(torch.from_numpy(np.sign(x.numpy())))

        return Leaving(WIDTH, WIDTH)


class Compared(Rows):
    """A loss that compares all samples of a batch."""

    whole_batch_loss = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        own = torch.arange(len(output), device=output.device)
        return nn.functional.cross_entropy(output @ output.T, own, reduction="none")


class Normed(Rows):
    """Batch normalisation."""

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(3)]
        return nn.Sequential(*layers)


class Lengths(Ragged):
    """Batches of one length each, which are longer or shorter than the one before."""

    def model(self) -> nn.Module:
        inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
        return nn.Sequential(nn.Embedding(256, WIDTH), *inner, nn.Linear(WIDTH, 8))

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)

    def collate(self, samples: Any) -> tuple[Tensor, Tensor]:
        length = 96 - int(samples[0][0][0]) % 8
        return torch.zeros(len(samples), length, dtype=torch.long), torch.zeros(len(samples)).long()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[:, 0], target, reduction="none")


class LargeOutput(Rows):
    """An output that is larger than all else, and that backward does not need."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (WIDTH, 1)), nn.Linear(1, 64))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        places = target[:, None].expand(-1, WIDTH)
        return nn.functional.cross_entropy(output.transpose(1, 2), places, reduction="none")


class Unchained(Rows):
    """Units of which the second does not take what the first one gives."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Unflatten(1, (4, 2)), nn.Flatten(), nn.Linear(8, 8))

    def units(self, model: Any) -> list[nn.Module]:
        return [model[0], model[1], model[3]]


class Swapped(Rows):
    """Units in another order than the model's."""

    def units(self, model: Any) -> list[nn.Module]:
        return [model[1], model[0], model[2]]


class Unscored(PySource):
    """A transformer without metrics: what a metric takes in an evaluation is not foreseen."""

    def metrics(self) -> dict[str, Any]:  # type: ignore[override]
        return {}
