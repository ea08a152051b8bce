"""WeightAverage: a moving average of a model's weights, under whatever plan they are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grappe.checkpoint.weights import AVERAGE, Weights, read_into
from grappe.private_api.torch import foreach_add_, foreach_mul_, local_tensor


class WeightAverage:
    """Averages what this process has of each trained parameter: average <- decay average + (1 - decay) weight.

    It begins with the first weights. Each number is averaged by itself, so a plan changes nothing.
    """

    def __init__(self, decay: float | None) -> None:
        self._decay = decay
        self.kept = decay is not None
        """True if there is an average: the task's `ema`."""
        self._weights: dict[str, nn.Parameter] = {}
        self._averages: dict[str, Tensor] = {}

    def watch(self, optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Begins with the weights as they are; for `Observers.optimizer`."""
        if self.kept:
            self._weights = dict(named)
            self._averages = {name: parameter.detach().clone() for name, parameter in named}

    def restore(self, tensors: Weights) -> None:
        """Restores the averages from a checkpoint; parameters without one start from the current weights."""
        for name, average in self._averages.items():
            average.copy_(self._weights[name].detach())
            if AVERAGE + name in tensors:
                read_into(average, tensors, AVERAGE + name)

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average after a step."""
        assert self._decay is not None, "no average is kept"
        if not self._averages:  # a pipeline's stage that is frozen
            return
        averages = [_local(average) for average in self._averages.values()]
        weights = [_local(weight) for weight in self._weights.values()]
        # Not lerp: parts of a tensor would be rounded otherwise than the whole.
        foreach_mul_(averages, self._decay)
        foreach_add_(averages, weights, alpha=1 - self._decay)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averaged tensors to save: sharded as the weights are."""
        return {AVERAGE + name: average for name, average in self._averages.items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averages as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, held in self._averages.items():
            weight, average = _local(self._weights[name].detach()), _local(held)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
