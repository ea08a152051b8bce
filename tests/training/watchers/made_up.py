"""Synthetic data of watchers' callbacks."""

import dataclasses
from pathlib import Path

from grappe.training.watchers.base import Record, RunInfo

INFO = RunInfo(
    folder=Path(),
    task="digits",
    plan="",
    engine="native",
    rank=0,
    world_size=1,
    device="cpu",
    start=0,
    last_step=9,
    total_steps=9,
    steps_per_epoch=3,
    batch_size=12,
    samples=29,
    description={},
)


def run_info(folder: Path, **changes: int) -> RunInfo:
    """A training in `folder`."""
    return dataclasses.replace(INFO, folder=folder, **changes)


def record(step: int, seconds: float = 0.001) -> Record:
    """A step of a training."""
    return Record(
        step=step, epoch=0, samples=12 * step, loss=1.0, lr=0.1, seconds=seconds, norm=None, skipped=False, flag=0
    )
