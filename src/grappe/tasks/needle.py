"""A small GPT finds a needle in a haystack: long synthetic texts, which may be too large for one process.

See the plan key domain. Shapes: B texts of T tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.tasks.pysource import GPT

if TYPE_CHECKING:
    import torchmetrics

NEEDLES = 10
"""Tokens below it are needles; a text has one of them, among tokens that mean nothing."""
TOKENS = 64
IGNORED = -1


class Needle(Task):
    """A GPT that remembers: it reads one of ten tokens in a text's first half, and names it throughout the second."""

    epochs: int = 4
    batch_size: int = 2
    lr: float = 3e-3
    length: int = 4096
    """Tokens of a text."""
    copies: int = 128
    """Places of the first half at which the needle is drawn to be."""
    texts: int = 64
    width: int = 32
    depth: int = 1
    heads: int = 2

    def model(self) -> nn.Module:
        return GPT(self.width, self.depth, self.heads, self.length, dropout=0.0)

    def data(self, split: str, folder: Path) -> Arrays:
        number, half = self.texts if split == "train" else max(1, self.texts // 4), self.length // 2
        generator = torch.Generator().manual_seed(["train", "validation", "test"].index(split))
        texts = torch.randint(NEEDLES, TOKENS, (number, self.length), generator=generator)
        needles = torch.randint(NEEDLES, (number, 1), generator=generator)
        places = torch.randint(half, (number, self.copies), generator=generator)
        texts.scatter_(1, places, needles.expand_as(places))
        targets = needles.expand_as(texts).clone()
        targets[:, :half] = IGNORED
        return Arrays(texts, targets)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED, reduction="none")

    def counts(self, target: Tensor) -> Tensor:
        return (target != IGNORED).float()

    def optimizer(self, named_parameters):  # noqa: ANN001, ANN201
        return torch.optim.Adam(named_parameters, lr=self.lr)

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        from torchmetrics.text import Perplexity  # takes seconds, in evaluations alone

        return {"perplexity": Perplexity(ignore_index=IGNORED)}

    def units(self, model: Any) -> list[nn.Module]:
        return [model.embed, *model.blocks, model.head]
