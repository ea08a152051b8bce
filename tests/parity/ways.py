"""Models whose graph depends on their samples: what a sum by position, and not by name, would get wrong."""

import torch
from torch import nn

from tests.parity.tasks import Tokens


class Ways(nn.Module):
    """Two layers of one shape: in one order or the other, or one of them alone, by the first token."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 11)
        self._both = both

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, second = (self.a, self.b) if int(tokens[0, 0]) % 2 else (self.b, self.a)
        x = first(self.embed(tokens))
        return self.head(second(x) if self._both else x)


class Forked(Tokens):
    """Task whose first rows' tokens are odd in some slices and even in others, already in the first step."""

    both: bool = True
    batch_size: int = 4
    samples: int = 16
    clip: float | None = None

    def model(self) -> nn.Module:
        return Ways(self.both)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [model]
