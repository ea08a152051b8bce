"""Defines Accuracy: the share of images whose class was found, of mixed training images too."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy


class Accuracy(MulticlassAccuracy):
    """Share of samples whose class is among the `top_k` largest outputs; of a mixed image, the larger part's class.

    So that `--training-metrics` has a curve under mixup and cutmix, whose targets are probabilities.
    """

    def __init__(self, classes: int, top_k: int = 1) -> None:
        super().__init__(classes, top_k=top_k, average="micro")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds outputs [B, K] and their classes [B], or the classes' probabilities [B, K]."""
        super().update(preds, target.argmax(1) if target.is_floating_point() else target)
