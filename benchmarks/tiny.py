"""The tiny network, its data, and the hand-written loop that everything is measured against.

Shapes: x [N, WIDTH], y [N]; a step takes BATCH rows in each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pacer import Pacer, Seat

WIDTH = 32
CLASSES = 10
SAMPLES = 4096
BATCH = 8  # rows in each process
LR = 0.1


class Tiny(nn.Sequential):
    """Three layers of 32 units."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )


def samples() -> tuple[Tensor, Tensor]:
    """The dataset, alike in every process."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=source)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=source)


def network() -> Tiny:
    """The network, its weights alike in every process."""
    torch.manual_seed(0)
    return Tiny()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """The cheapest optimizer there is, so that what is added to a step weighs most."""
    return torch.optim.SGD(net.parameters(), lr=LR)


def epochs(seat: Seat) -> Iterator[tuple[Tensor, ...]]:
    """For ever: an epoch's batches of ids, shuffled anew, of which this process takes its own."""
    shuffle = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(SAMPLES, generator=shuffle)
        yield order[seat.rank :: seat.size].to(seat.device).split(BATCH)


def loop(net: Any, optimizer: Any, backward: Callable[[Tensor], Any], seat: Seat, pacer: Pacer) -> None:
    """The loop as a person writes it; the rivals that let one write it get the same."""
    x, y = (one.to(seat.device) for one in samples())
    for epoch in epochs(seat):
        for ids in epoch:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[ids]), y[ids])
            backward(loss)
            optimizer.step()
            pacer.tick()
