"""A task that takes no time to train, and fails in each way on request."""

import os
import signal
import time
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from grappe import Arrays, Task
from grappe.errors import TaskError


class Line(Task):
    """A straight line through sixteen points."""

    epochs: int = 3
    batch_size: int = 8
    lr: float = 0.1
    width: int = 1
    how: Literal["well", "nan", "memory", "broken", "killed"] = "well"
    pause: float = 0.0
    while_there: str = ""
    """A file; only while it exists, there are pauses."""

    def __post_init__(self) -> None:
        if self.width == 13:
            raise TaskError("width=13 brings bad luck: give another")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.width), nn.Linear(self.width, 1))

    def data(self, split: str, folder: Path) -> Arrays:
        x = torch.linspace(-1, 1, 16)[:, None]
        return Arrays(x, (0.5 * x - 0.2)[:, 0])

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not self.while_there or Path(self.while_there).exists():
            time.sleep(self.pause)
        if self.how == "memory" and torch.is_grad_enabled():
            raise MemoryError("no more")
        if self.how == "killed" and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "broken":
            raise KeyError("a bug of the user's")
        value = (output[:, 0] - target) ** 2
        return value * float("nan") if self.how == "nan" else value

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=self.lr)
