"""A training script as its author would write it, around `grappe.Loop`: images, dropout, a schedule, a clipped norm."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import grappe

SAMPLES, BATCH = 500, 64
"""The last batch is short, and parts of it have different lengths."""


def network(dropout: float = 0.0) -> nn.Sequential:
    """Makes a network with a list of equal blocks, which a plan may shard, recompute or compile."""
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU()) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), *blocks, nn.Flatten(), nn.Dropout(dropout), nn.Linear(32 * 49, 10)
    )


def main() -> None:
    """Trains two epochs into a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, 3, 16, 16), torch.randint(0, 10, (SAMPLES,)))
    model = network(options.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    with grappe.Loop(run=options.run) as loop:
        model, optimizer = loop.parallelize(model, optimizer)
        loop.keep(schedule=schedule)
        for _ in loop.epochs(2):
            for images, labels in loop.batches(data, BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()


if __name__ == "__main__":
    main()
