"""A recurrent model whose hidden state goes from batch to batch; it may count, and draw from its own generator."""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Sampling, Task

COLUMNS, CHUNKS, LENGTH = 4, 6, 3
RARE = 3  # only in the second half of the columns at first


class Recurrent(nn.Module):
    """A cell over a chunk of each column; the last state is the next chunk's first."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (nn.Embedding(7, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 7))
        self.way = way
        self.hidden: Any = None
        self.last: Any = None
        self.calls = 0
        self.history: list[Any] = []
        self.noise = torch.Generator().manual_seed(4)
        self.strange = object()
        self.length = 0
        self.table: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden
        if self.way != "hidden" or hidden is None or hidden[0].shape[1] != len(tokens):
            hidden = None
        output, state = self.cell(self.embed(tokens), hidden)
        self.last = output.detach()
        if self.length != tokens.shape[1]:  # as rotary embeddings keep their tables
            self.length = tokens.shape[1]
            self.table = torch.linspace(0.5, 1, 6 * self.length).view(self.length, 6)
        output = output * self.table
        if self.way == "rare":
            self.calls += int((tokens[:, 0] == RARE).any())
            return self.head(output) * (1 + 0.1 * self.calls)
        if self.way == "numbers":
            self.calls += 1
            self.history = [*self.history, float(self.calls)]
            self.strange = object() if self.strange else None
            return self.head(output) * (1 + 0.1 * self.calls) + torch.rand(1, generator=self.noise)
        self.hidden = tuple(part.detach() for part in state)
        return self.head(output)


class Stream(Task):
    """Four columns of text, read chunk by chunk."""

    epochs: int = 2
    batch_size: int = COLUMNS
    way: Literal["hidden", "numbers", "rare"] = "hidden"
    consecutive_batches = True

    def model(self) -> nn.Module:
        return Recurrent(self.way)

    def data(self, split: str, folder: Path) -> Arrays:
        text = torch.randint(0, 7, (COLUMNS, CHUNKS, LENGTH + 1), generator=torch.Generator().manual_seed(8))
        rows = text.transpose(0, 1).flatten(0, 1)  # all columns' first chunks, then their second ones
        return Arrays(rows[:, :-1], rows[:, 1:])

    def sampling(self, dataset: Any) -> Sampling:
        return Sampling(shuffle=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.5, momentum=0.5)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [model.embed, model.cell, model.head]
