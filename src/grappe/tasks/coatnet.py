"""CoAtNet, convolution stages and then attention stages, in the sizes 0 to 7: a model too large for one device.

Dai, Liu, Le, Tan (2021), "CoAtNet: Marrying Convolution and Attention for All Data Sizes", arXiv:2106.04803, with
its tables 3, 11 and 12; without stochastic depth. For S4 of size 6 table 12 prints 2048 channels, which would make
1,346 million parameters; with 3072 the parameters (1,470 million) and operations equal the paper's.

Shapes: B images, C channels, H x W pixels, N = H W tokens, K heads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.errors import TaskError
from grappe.tasks.digits import Digits

if TYPE_CHECKING:
    import torchmetrics
    from torch.distributed.tensor.parallel import ParallelStyle


class Size(NamedTuple):
    """One column of the paper's tables."""

    convolution: tuple[tuple[int, int], ...]
    """(blocks, channels) of S0, S1, S2; sizes 6 and 7 have some in S3, too."""
    attention: tuple[tuple[int, int], ...]
    """(blocks, channels) of S3, S4."""
    head: int = 32
    """Channels of each attention head."""


SIZES = {
    0: Size(((2, 64), (2, 96), (3, 192)), ((5, 384), (2, 768))),
    1: Size(((2, 64), (2, 96), (6, 192)), ((14, 384), (2, 768))),
    2: Size(((2, 128), (2, 128), (6, 256)), ((14, 512), (2, 1024))),
    3: Size(((2, 192), (2, 192), (6, 384)), ((14, 768), (2, 1536))),
    4: Size(((2, 192), (2, 192), (12, 384)), ((28, 768), (2, 1536))),
    5: Size(((2, 192), (2, 256), (12, 512)), ((28, 1280), (2, 2048)), 64),
    6: Size(((2, 192), (2, 192), (4, 384), (8, 768)), ((42, 1536), (2, 3072)), 128),
    7: Size(((2, 192), (2, 256), (4, 512), (8, 1024)), ((42, 2048), (2, 3072)), 128),
}
EXPANSION = 4
SHRINK = 4  # of squeeze-and-excitation, from the channels before they are expanded


class Squeeze(nn.Module):
    """Weighs each channel by a function of the whole image: Hu, Shen, Sun (2018), "Squeeze-and-excitation networks"."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.gelu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class Convolution(nn.Module):
    """An inverted bottleneck with a depthwise convolution, pre-activated (equation 5 where it halves the image)."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = EXPANSION * channels
        self.residual = nn.Sequential(
            nn.BatchNorm2d(before),
            nn.Conv2d(before, wide, 1, stride, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
            Squeeze(wide, channels // SHRINK),
            nn.Conv2d(wide, channels, 1),
        )  # fmt: skip
        self.pool = nn.MaxPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()
        self.project = nn.Conv2d(before, channels, 1) if before != channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.pool(x)) + self.residual(x)


class Attention(nn.Module):
    """Self-attention over all positions with a learned bias for each relative offset, then a feed-forward layer."""

    def __init__(self, before: int, channels: int, stride: int, side: int, head: int) -> None:
        super().__init__()
        self.heads, self.side = channels // head, side
        self.norm, self.norm_wide = nn.LayerNorm(before), nn.LayerNorm(channels)
        self.pool = nn.MaxPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()
        self.project = nn.Linear(before, channels) if before != channels else nn.Identity()
        self.queries_keys_values = nn.Linear(before, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.offsets = nn.Parameter(torch.zeros(self.heads, (2 * side - 1) ** 2))
        place = torch.arange(side)
        apart = place[:, None] - place[None, :] + side - 1  # [side, side], 0 to 2 side - 2
        index = apart[:, None, :, None] * (2 * side - 1) + apart[None, :, None, :]
        # For each pair of positions, [N, N], its index among the (2 side - 1)^2 biases.
        self.register_buffer("index", index.reshape(side * side, side * side), persistent=False)
        self.wide = nn.Linear(channels, EXPANSION * channels)
        self.narrow = nn.Linear(EXPANSION * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, C, H, W] to [B, C', H', W']."""
        tokens, normal = self._pooled(x), self._pooled(self.norm(x.movedim(1, 3)).movedim(3, 1))
        tokens = self.project(tokens) + self._attend(normal)
        tokens = tokens + self.narrow(F.gelu(self.wide(self.norm_wide(tokens))))
        return tokens.transpose(1, 2).unflatten(2, (self.side, self.side))

    def _pooled(self, x: Tensor) -> Tensor:
        return self.pool(x).flatten(2).transpose(1, 2)  # [B, N, C]

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.offsets[:, self.index].to(q.dtype)  # [K, N, N]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))


def coatnet(size: Size, channels: int, classes: int, side: int) -> nn.Sequential:
    """Makes the network for images [B, channels, side, side]: stem, blocks and head in sequence."""
    (stem_blocks, width), *rest = size.convolution
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 2, padding=1, bias=False)]
    for _ in range(stem_blocks - 1):
        layers += [nn.BatchNorm2d(width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)]
    units: list[nn.Module] = [nn.Sequential(*layers)]
    side = math.ceil(side / 2)
    halve = [True, True, True, False]  # convolutions that moved into S3 halve the image for its attention
    for (blocks, wide), halves in zip(rest, halve, strict=False):
        for index in range(blocks):
            units.append(Convolution(width, wide, 2 if index == 0 and halves else 1))
            width = wide
        side = math.ceil(side / 2) if halves else side
    for stage, (blocks, wide) in enumerate(size.attention):
        for index in range(blocks):
            halves = index == 0 and not (stage == 0 and len(rest) == 3)
            side = math.ceil(side / 2) if halves else side
            units.append(Attention(width, wide, 2 if halves else 1, side, size.head))
            width = wide
    units.append(Classifier(width, classes))
    return nn.Sequential(*units)


class Classifier(nn.Module):
    """The mean over all positions, and a linear layer to the classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.norm(x.mean((2, 3))))


IMAGES = 22 * 64
"""Training samples of 1,437: a pipeline cuts no odd batch evenly, and fills none where there is batch normalisation."""


class CoAtNet(Task):
    """A CoAtNet of size 0 (25 million parameters) to 7 (2,440 million) on handwritten digits, enlarged."""

    epochs: int = 5
    batch_size: int = 64
    clip: float | None = 1.0
    size: Literal[0, 1, 2, 3, 4, 5, 6, 7] = 0
    side: int = 32
    """Pixels of an image's side: 224 in the paper's tables."""
    lr: float = 3e-4
    weight_decay: float = 0.05
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side < 16:
            raise TaskError(f"side={self.side}: five stages halve it, so it must be at least 16")

    def model(self) -> nn.Module:
        return coatnet(SIZES[self.size], 1, 10, self.side)

    def data(self, split: str, folder: Path) -> Arrays:
        digits, side = Digits().data(split, folder), self.side
        kept = IMAGES if split == "train" else len(digits)
        return Arrays(
            digits.inputs[:kept],
            digits.targets[:kept],
            transform=lambda x: F.interpolate(x.float() / 128 - 1, (side, side)),
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none", label_smoothing=self.smoothing)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [each for each in named if each[1].dim() > 1], "weight_decay": self.weight_decay},
            {"params": [each for each in named if each[1].dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr)

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int):  # noqa: ANN201
        warm = max(1, total_steps // 20)

        def factor(step: int) -> float:
            rest = max(0, step - warm) / max(1, total_steps - warm)
            return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def prediction(self, output: Tensor) -> dict[str, Tensor]:
        probability, number = output.softmax(1).max(1)
        return {"class": number, "probability": probability}

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        from torchmetrics.classification import MulticlassAccuracy  # takes seconds, in evaluations alone

        return {"accuracy": MulticlassAccuracy(10, average="micro")}

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def tensor_plan(self, model: nn.Module) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from grappe.parallel.tensor import SplitOutputs, split_convolutions

        styles = split_convolutions(model)
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                styles |= {f"{name}.{layer}": SplitOutputs() for layer in ("queries_keys_values", "out")}
                styles |= {f"{name}.wide": ColwiseParallel(), f"{name}.narrow": RowwiseParallel()}
        return styles
