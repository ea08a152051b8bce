"""Tasks of two losses; each with a count of its own, in two shapes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parity.tasks import Images


class Several(Images):
    """Images with two losses."""

    def loss(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        return {"classes": F.cross_entropy(output, target, reduction="none"), "size": 0.1 * output.square().mean(1)}


class Counted(Several):
    """Losses of shapes and counts of their own, which have a row for each sample."""

    def loss(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        return {**super().loss(output, target), "size": output.square()}

    def counts(self, target: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        return {"classes": 0.5 + target, "size": (target > 3)[:, None].expand(-1, 5).float()}


class Chosen(Counted):
    """The same loss, where the values that count nothing are left out: no row for each sample."""

    def loss(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        return {**super().loss(output, target), "size": output[target > 3].square()}

    def counts(self, target: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        return {"classes": 0.5 + target, "size": torch.ones(int((target > 3).sum()), 5)}
