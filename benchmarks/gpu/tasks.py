"""Tasks of the GPU proof: small ones whose weights are compared, GPT-2's shape for speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task


class Small(Task):
    """Images, convolutions and an uneven last batch; dropout where one plan is compared with itself."""

    epochs: int = 1
    batch_size: int = 64
    clip: float | None = 1.0
    samples: int = 1000
    dropout: float = 0.0
    loud: bool = False
    """One sample is a million times larger: fp16 overflows there."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
            nn.Sequential(nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Dropout(self.dropout)),
            nn.Sequential(nn.Flatten(), nn.Linear(32 * 49, 64), nn.GELU()),
            nn.Linear(64, 10),
        )

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def data(self, split: str, folder: Path) -> Arrays:
        random = np.random.default_rng(5 if split == "train" else 6)
        images = random.standard_normal((self.samples, 3, 16, 16), np.float32)
        if self.loud and split == "train":
            images[self.samples // 2] *= 1e6
        return Arrays(images, random.integers(0, 10, self.samples))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)


class LanguageTask(Task):
    """A language model on random tokens, with AdamW; says the operations of a token."""

    epochs: int = 1
    clip: float | None = 1.0
    lr: float = 3e-4
    vocabulary: int = 512
    context: int = 64
    width: int = 64
    depth: int = 2
    samples: int = 256

    def data(self, split: str, folder: Path) -> Arrays:
        random = np.random.default_rng(5 if split == "train" else 6)
        tokens = random.integers(0, self.vocabulary, (self.samples, self.context + 1))
        return Arrays(tokens[:, :-1].copy(), tokens[:, 1:].copy())

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view_as(target)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=self.lr, betas=(0.9, 0.95), fused=torch.cuda.is_available())

    def flops_per_token(self) -> float:
        """Operations of forward and backward without the embedding: 6 N + 12 L W T.

        Chowdhery et al. 2022, appendix B.
        """
        matrices = self.depth * self.block_weights() + self.width * self.vocabulary
        return 6.0 * matrices + 12.0 * self.depth * self.width * self.context

    def block_weights(self) -> int:
        """Counts the numbers in the matrices of a block."""
        raise NotImplementedError


class Tokens(LanguageTask):
    """GPT-2's shape (Radford et al. 2019) on random tokens: 50,304 of them, 1,024 a sample."""

    batch_size: int = 32
    vocabulary: int = 50_304
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    samples: int = 4096

    def model(self) -> nn.Module:
        from grappe.tasks.pysource import GPT

        model = GPT(self.width, self.depth, self.heads, self.context, 0.0)
        model.embed.bytes = nn.Embedding(self.vocabulary, self.width)
        model.head.logits = nn.Linear(self.width, self.vocabulary, bias=False)
        return model

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [model.embed, *model.blocks, model.head]  # type: ignore[list-item]

    def block_weights(self) -> int:
        return 12 * self.width**2
