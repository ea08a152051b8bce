"""A small GPT, byte by byte, on the source of Python's own standard library: real text on every machine.

Shapes: B windows of T bytes, W the width, H the heads.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.errors import TaskError

if TYPE_CHECKING:
    import torchmetrics
    from torch.distributed.tensor.parallel import ParallelStyle

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
PARTS = {"train": range(8), "validation": (8,), "test": (9,)}  # of each ten files in order
IGNORED = -1  # the target that does not count: a file's first byte, which no other file predicts
BYTES = 256
SIZES = {  # width, depth, heads; from small on GPT-2's (Radford et al. 2019, table 2; heads from its code)
    "tiny": (128, 4, 4),
    "mini": (512, 8, 8),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
}


class Block(nn.Module):
    """Attention, then two layers on each byte, each with pre-normalisation and a residual connection: [B, T, W]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No biases: a key's would have rounding errors for a gradient, and AdamW steps as far on those.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.merge = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def attend(self, x: Tensor) -> Tensor:
        # As many heads as came out: under tensor parallelism, this process's share of them.
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, W / H]
        return self.merge(heads.transpose(1, 2).flatten(2))


class Embed(nn.Module):
    """Embeds bytes and their positions, [B, T] to [B, T, W]."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))


class Head(nn.Module):
    """Computes the next bytes' logits: [B, T, W] to [B, T, 256]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019) without its tokeniser: [B, T] to the next bytes' logits [B, T, 256]."""

    def __init__(self, width: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed = Embed(width, context)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.head = Head(width)
        for name, parameter in self.named_parameters():
            if name.endswith(("merge.weight", "down.weight")):  # 2 * depth of these add up
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PySource(Task):
    """A byte-level GPT on the standard library's source; needs no download."""

    epochs: int = 1
    batch_size: int = 32
    clip: float | None = 1.0
    lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.05
    """The share of the steps in which the learning rate rises."""
    size: Literal["tiny", "mini", "small", "medium", "large", "xl"] = "tiny"
    """Default width, depth and heads; small to xl are GPT-2's."""
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    context: int = 128
    """Bytes in a sample."""
    dropout: float = 0.0
    megabytes: float = 2.0
    """Approximate amount of source text, for all splits together; the whole library has about 11 MB."""

    def model(self) -> nn.Module:
        width, depth, heads = self.shape
        if width % heads:
            raise TaskError(f"width={width} cannot be cut into heads={heads}: make it a multiple")
        return GPT(width, depth, heads, self.context, self.dropout)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns width, depth and heads."""
        width, depth, heads = SIZES[self.size]
        return self.width or width, self.depth or depth, self.heads or heads

    def data(self, split: str, folder: Path) -> Arrays:
        part, files = PARTS[split], enumerate(_sources(self.megabytes * 1e6))
        text = np.frombuffer(b"\0".join(file for number, file in files if number % 10 in part), np.uint8)
        count = max(0, len(text) - 1) // self.context
        if not count:
            raise TaskError(f"megabytes={self.megabytes} leaves no {split} sample of context={self.context} bytes")
        targets = text[1 : count * self.context + 1].astype(np.int64)
        targets[text[: len(targets)] == 0] = IGNORED
        inputs = text[: len(targets)].copy()
        shape = (count, self.context)
        return Arrays(inputs.reshape(shape), targets.reshape(shape), transform=Tensor.long)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        values = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
        return values.view_as(target)

    def counts(self, target: Tensor) -> Tensor:
        return (target != IGNORED).float()

    def optimizer(self, named_parameters):  # noqa: ANN001, ANN201
        matrices, vectors = [], []
        for name, parameter in named_parameters:
            (vectors if name.endswith("bias") or "norm" in name else matrices).append((name, parameter))
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int):  # noqa: ANN201
        rising = max(1, round(self.warmup * total_steps))

        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / max(1, total_steps - rising))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        # Imported here: torchmetrics takes seconds, in evaluations alone.
        from grappe.tasks.text.bits_per_byte import BitsPerByte

        return {"bits_per_byte": BitsPerByte(ignore_index=IGNORED)}

    def units(self, model: Any) -> list[nn.Module]:
        return [model.embed, *model.blocks, model.head]

    def tensor_plan(self, model: Any) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        styles = {}
        for number in range(self.shape[1]):
            styles |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
            styles |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("merge", "down")}
        return styles


def _sources(size: float) -> Iterator[bytes]:
    """Reads the library's files, in the same order on every machine, up to `size` bytes."""
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - SKIPPED)
        for name in sorted(name for name in names if name.endswith(".py")):
            if size <= 0:
                return
            text = Path(folder, name).read_bytes()
            size -= len(text)
            yield text
