"""The tiny network as tasks of grappe's: as it is, and with the optimizer that says when its first step is done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks import tiny
from benchmarks.starting import Told
from grappe import Arrays, Task


class TinyTask(Task):
    """Random rows, random classes."""

    batch_size: int = tiny.BATCH

    def model(self) -> nn.Module:
        return tiny.network()

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(*tiny.samples())

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(named_parameters, lr=tiny.LR)


class Telling(TinyTask):
    """For benchmarks.startup."""

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return Told(named_parameters, lr=tiny.LR)
