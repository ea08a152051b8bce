"""Defines BitsPerByte: how well a model predicts the next byte."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.text import Perplexity


class BitsPerByte(Perplexity):
    """The base-2 logarithm of the perplexity: 8 for uniform guesses."""

    def compute(self) -> Tensor:
        return super().compute().log2()
