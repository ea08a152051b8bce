"""A plain loop of the gallery, as a person writes it."""

from __future__ import annotations

import torch

from benchmarks import gallery_files
from benchmarks.pacer import Pacer, Seat

NEVER = 10**9


def run(seat: Seat, pacer: Pacer, name: str) -> None:
    """Steps for ever; the pacer ends it."""
    plain = gallery_files.plain(name)
    torch.manual_seed(0)
    found = plain.data("train")
    count = len(found[0]) if isinstance(found, tuple) else len(found)
    for _ in plain.train(plain.network(), lambda _: torch.randperm(count).split(plain.BATCH), epochs=NEVER):
        pacer.tick()
