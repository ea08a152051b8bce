"""A task whose phases sleep known times, so that it is known where its time goes."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Task


class Naps(Dataset):
    """16 points, each of which takes a while to load."""

    def __init__(self, nap: float) -> None:
        self.nap = nap

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.nap)
        return torch.arange(3.0) / 48 + index / 16, index % 2


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, nap: float) -> Tensor:
        context.nap = nap
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        time.sleep(context.nap)
        return gradients[0], None


class Layer(nn.Linear):
    """Sleeps before it computes, and in its backward before its own gradients."""

    def __init__(self, width: int, forward: float, backward: float) -> None:
        super().__init__(3, width)
        self.naps = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.naps[0])
        return _SleepInBackward.apply(super().forward(x), self.naps[1])


class Net(nn.Sequential):
    """Two layers that share the naps."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__(*(Layer(width, forward / 2, backward / 2) for width in (3, 2)))


class SlowSGD(torch.optim.SGD):
    """Sleeps in each step, and takes note of when it is over."""

    nap = 0.0
    over: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        found = None
        if closure is not None:  # an engine's forward and backward
            with torch.enable_grad():
                found = closure()
        time.sleep(self.nap)
        super().step()
        SlowSGD.over()
        return found


class Sleeping(Task):
    """Two classes of 16 points."""

    epochs: int = 4
    batch_size: int = 4
    load: float = 0.0
    """Seconds that each sample takes."""
    ahead: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    late: float = 0.0
    """Seconds more that process 1 takes for each forward."""

    def model(self) -> nn.Module:
        world = os.environ.get("SLEEPING_LATE"), multiprocessing.current_process().name
        late = self.late if world[0] == "1" or world[1] == "grappe-rank-1" else 0.0
        return Net(self.ahead + late, self.backward)

    def units(self, model: Net) -> list[nn.Module]:
        return list(model)

    def data(self, split: str, folder: Path) -> Naps:
        return Naps(self.load if split == "train" else 0.0)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> SlowSGD:
        SlowSGD.nap = self.update  # of the class, as Horovod makes an optimizer of its own from it
        return SlowSGD(named_parameters, lr=0.1)
