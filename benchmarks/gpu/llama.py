"""Blocks of the shape of a 7B language model, with a small vocabulary, so that the blocks are what is measured.

Touvron et al. 2023, "LLaMA", arXiv:2302.13971, table 2. Shapes: B samples of T tokens, W the width, H the heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.tasks import LanguageTask


class Block(nn.Module):
    """Attention with rotary positions, then SwiGLU, each behind an RMS norm: [B, T, W]."""

    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        each = width // heads
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(0, each, 2) / each))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.merge(heads.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        """Turns pairs of numbers by their position's angles: [B, H, T, W / H]."""
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)  # type: ignore[operator]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)


class Llama(LanguageTask):
    """Three blocks of LLaMA 7B's shape on random tokens, in one batch of 16,384."""

    batch_size: int = 8
    lr: float = 1e-4
    vocabulary: int = 1024
    context: int = 2048
    width: int = 4096
    hidden: int = 11_008
    depth: int = 3
    heads: int = 32
    samples: int = 512

    def model(self) -> nn.Module:
        blocks = [Block(self.width, self.heads, self.hidden, self.context) for _ in range(self.depth)]
        head = nn.Sequential(nn.RMSNorm(self.width), nn.Linear(self.width, self.vocabulary, bias=False))
        return nn.Sequential(nn.Embedding(self.vocabulary, self.width), *blocks, head)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def block_weights(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.hidden
