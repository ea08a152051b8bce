"""Small tasks that parity is checked on: each has something that a wrong plan would get wrong."""

from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from grappe import Arrays, Task


class Seen(Metric):
    """Metric that counts samples: a sum, which merging twice would double."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.count += len(target)

    def compute(self) -> torch.Tensor:
        return self.count


class Images(Task):
    """A small convolutional network; 29 samples in batches of 12, so that the last batch is short and odd."""

    epochs: int = 2
    batch_size: int = 12
    rule: Literal["sgd", "adam"] = "sgd"
    batchnorm: bool = False
    scheduled: bool = True
    dropout: float = 0.0
    samples: int = 29
    frozen: bool = False
    unused: bool = False

    def model(self) -> nn.Module:
        norm = nn.BatchNorm2d(8) if self.batchnorm else nn.Identity()
        # A bias in front of batch normalisation has a gradient of 0 but for rounding, which Adam blows up.
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=not self.batchnorm), norm, nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Dropout(self.dropout)),
            nn.Sequential(nn.Flatten(), nn.Linear(8 * 9, 16), nn.Tanh()),
            nn.Linear(16, 5),
        )
        if self.frozen:
            model[0].requires_grad_(False)
        if self.unused:
            model.register_parameter("spare", nn.Parameter(torch.ones(3)))
        return model

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(self.samples, 3, 8, 8, generator=generator)
        return Arrays(images, torch.randint(0, 5, (self.samples,), generator=generator))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        matrices, rest = [], []
        for name, parameter in named_parameters:
            (rest if name.endswith("bias") else matrices).append((name, parameter))
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        if self.rule == "adam":
            return torch.optim.Adam(groups, lr=0.003)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def metrics(self):
        # One whose state is a sum, one whose state is a list, one that is a number per class.
        return {
            "accuracy": MulticlassAccuracy(5, average="micro"),
            "auroc": MulticlassAUROC(5),
            "each": MulticlassAccuracy(5, average=None),
            "seen": Seen(),
        }

    def scored(self, output: torch.Tensor) -> torch.Tensor:
        return output.softmax(1)  # which torchmetrics' AUROC would take from each batch of logits by itself

    def schedule(self, optimizer, total_steps: int):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps + 3) if self.scheduled else None

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)


class Block(nn.Module):
    """Attention-free transformer block: norm, wide, gelu, narrow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Words(nn.Module):
    """Token embedding, blocks, head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(Task):
    """Per-token losses with ignored tokens, unevenly spread over the samples."""

    epochs: int = 2
    batch_size: int = 7
    clip: float | None = 0.3
    rule: Literal["sgd", "adam"] = "adam"
    samples: int = 17

    def model(self) -> nn.Module:
        return Words(16, 2)

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(6)
        tokens = torch.randint(0, 11, (self.samples, 9), generator=generator)
        targets = tokens.roll(-1, 1)
        keep = torch.randint(1, 9, (self.samples, 1), generator=generator)
        targets = torch.where(torch.arange(9) < keep, targets, -1)
        return Arrays(tokens, targets)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, reduction="none", ignore_index=-1)

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        return (target >= 0).float()

    def optimizer(self, named_parameters):
        if self.rule == "adam":
            return torch.optim.Adam(named_parameters, lr=0.003)
        return torch.optim.SGD(named_parameters, lr=0.1, momentum=0.9)

    def schedule(self, optimizer, total_steps: int):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    def units(self, model: Words) -> list[nn.Module]:
        return [model.embed, *model.blocks, model.head]

    def tensor_plan(self, model: Words):
        plan = {}
        for index in range(len(model.blocks)):
            plan[f"blocks.{index}.wide"] = ColwiseParallel()
            plan[f"blocks.{index}.narrow"] = RowwiseParallel()
        return plan
