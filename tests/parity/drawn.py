"""A task whose model and loss draw random numbers in every way that is found by the rows of a batch."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

import grappe

WIDTH = 8
LENGTH = 7  # of no microbatch: rows are found by their number


class Drawing(nn.Module):
    """Layers that draw in every way that is found by its rows; input and output are [b, LENGTH, WIDTH]."""

    def __init__(self, salt: int) -> None:
        super().__init__()
        self.inner, self.salt = nn.Linear(WIDTH, WIDTH), salt
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout1d(F.alpha_dropout(self.inner(x), 0.1, True), 0.2)
        x = x * (grappe.rand_like(x, salt=self.salt) < 0.9) + 0.1 * grappe.randn_like(x, salt=self.salt)
        x = x + torch.bernoulli(torch.full((len(x), 1, 1), 0.8)) * self.lstm(x)[0]  # drop path
        x = x + self.attention(x, x, x)[0] + 0.1 * torch.randn_like(x) * torch.rand(len(x), 1, 1)
        x = x + 0.1 * torch.empty_like(x).exponential_() * torch.rand(())
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).transpose(1, 2).flatten(-2)
        return torch.tanh(0.5 * x * torch.randint(1, 3, (len(x), 1, 1)))


class Split(nn.Module):
    """Attention and two layers that tensor= splits, with draws between the split layers: [b, LENGTH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.up = (nn.Linear(WIDTH, 16, bias=False) for _ in range(4))
        self.merge, self.down = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        by_time = [layer(x).unflatten(-1, (-1, 4)) for layer in (self.query, self.key, self.value)]
        q, k, v = (heads.transpose(1, 2) for heads in (F.dropout(by_time[0], 0.1), *by_time[1:]))
        mixed = F.scaled_dot_product_attention(q + 0.1 * torch.randn_like(q), k, v, dropout_p=0.3)
        x = x + F.dropout(self.merge(mixed.transpose(1, 2).flatten(2)), 0.2)
        hidden = F.alpha_dropout(F.dropout(self.up(x), 0.3), 0.1, True)
        paths = torch.bernoulli(torch.full((len(x), 1, 1), 0.8)) * torch.rand(())
        return x + F.dropout(self.down(paths * hidden * torch.bernoulli(hidden.sigmoid())), 0.2)


class Drawn(grappe.Task):
    """A regression on sequences; 29 samples in batches of 12, so that the last batch is short and odd."""

    epochs: int = 2
    batch_size: int = 12
    noisy_loss: bool = True

    def model(self) -> nn.Module:
        ends = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(LENGTH * WIDTH, 3))
        return nn.Sequential(nn.Dropout(0.2), Drawing(0), Split(), Drawing(1), ends)

    def units(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return list(model)

    def tensor_plan(self, model: nn.Module) -> dict[str, ColwiseParallel | RowwiseParallel]:
        wide = {f"2.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
        return wide | {"2.merge": RowwiseParallel(), "2.down": RowwiseParallel()}

    def data(self, split: str, folder: Path) -> grappe.Arrays:
        generator = torch.Generator().manual_seed(1)
        return grappe.Arrays(
            torch.randn(29, LENGTH, WIDTH, generator=generator), torch.randn(29, 3, generator=generator)
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        noise = torch.randn_like(target) + grappe.randn_like(target, salt=9) if self.noisy_loss else 0.0
        return F.mse_loss(output, target + 0.3 * noise, reduction="none").mean(1)

    def optimizer(self, named):
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.05, momentum=0.9)
