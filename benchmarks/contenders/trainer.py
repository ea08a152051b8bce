"""Lightning's Trainer, made as light as it gets: barebones, and the cheapest DataLoader that shuffles.

It owns its loop and wants a loader. This one hands whole batches of ids to the dataset, which indexes tensors
as the hand-written loop does; nothing is collated, no worker is started, and no epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks import tiny
from benchmarks.pacer import Pacer, Seat

NEVER = 10**9


class Rows(Dataset):
    """The samples; an index is a tensor of ids."""

    def __init__(self) -> None:
        self._x, self._y = tiny.samples()

    def __getitem__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._x[ids], self._y[ids]


class Batches(Sampler):
    """Batches of ids without end."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def __iter__(self) -> Iterator[Tensor]:
        for epoch in tiny.epochs(self._seat):
            yield from epoch

    def __len__(self) -> int:
        return NEVER


class Module(LightningModule):
    """The tiny network."""

    def __init__(self, pacer: Pacer) -> None:
        super().__init__()
        self.net = tiny.network()
        self._pacer = pacer

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._pacer.tick()  # between the same two places of neighbouring steps, so once a step as elsewhere
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return tiny.optimizer(self)


def run(seat: Seat, pacer: Pacer) -> None:
    """Steps for ever; the pacer ends it."""
    trainer = Trainer(
        accelerator="cpu",
        devices=seat.size,
        strategy="ddp" if seat.size > 1 else "auto",
        max_epochs=-1,
        barebones=True,
        use_distributed_sampler=False,
    )
    loader = DataLoader(Rows(), sampler=Batches(seat), batch_size=None, collate_fn=_as_it_is)
    trainer.fit(Module(pacer), loader)


def _as_it_is(batch: Any) -> Any:
    return batch
