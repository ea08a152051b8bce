"""A task whose stages carry clocks: each pass takes a given time on its process's, and messages bring the sender's.

So a real pipeline says how long each process waits, on any machine (Lamport 1978, "Time, clocks, and the ordering of
events in a distributed system").
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.launch.rank import ProcessRank
from tests.parity import cell

FORWARD, INPUTS, WEIGHTS = 2.0, 3.0, 1.0
"""Time of a stage's forward, and of the two halves of its backward."""
clock = {"now": 0.0, "busy": 0.0}


def take(time: float) -> None:
    clock["now"] += time
    clock["busy"] += time


class Ahead(torch.autograd.Function):
    """Begins a unit's forward when its input is there; its backward is that of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
        clock["now"] = max(clock["now"], float(sent))
        take(FORWARD)
        return x.view_as(x), torch.full_like(sent, clock["now"])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        take(INPUTS)
        return gradients[0], torch.full_like(gradients[1], clock["now"])


class Used(torch.autograd.Function):
    """The identity of a weight, whose backward is that of the weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        take(WEIGHTS)
        return gradients[0]


class Left(torch.autograd.Function):
    """The identity of what is sent, made last: its backward is first, and awaits the gradient."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor) -> Tensor:
        return sent.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        clock["now"] = max(clock["now"], float(gradients[0]))
        return gradients[0]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        x, sent = value if isinstance(value, tuple) else (value, torch.zeros(1, requires_grad=True))
        if not torch.is_grad_enabled():
            return x @ self.weight, sent + 0
        x, sent = Ahead.apply(x, sent)
        return x @ Used.apply(self.weight), Left.apply(sent)


class Clocked(Task):
    """As many units as stages, all alike."""

    batch_size: int = 32
    stages: int = 2

    def model(self) -> nn.Module:
        return nn.Sequential(*[Unit() for _ in range(self.stages)])

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)  # type: ignore[call-overload]

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.ones(32, 4), torch.ones(32, 4))

    def loss(self, output: Any, target: Tensor) -> Tensor:
        x, sent = output
        return (x - target).square().mean(1) + 0.0 * sent

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.1)


def step(process: ProcessRank, rendezvous_folder: Path, plan: str, stages: int) -> tuple[float, float]:
    """Trains a step; returns when this process ended, and how long it computed."""
    clock.update(now=0.0, busy=0.0)
    cell.train(process, rendezvous_folder, Clocked(stages=stages), plan, 1)
    return clock["now"], clock["busy"]
