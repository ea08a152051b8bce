"""Lightning Fabric: the same loop through its wrappers."""

from __future__ import annotations

from lightning.fabric import Fabric

from benchmarks import tiny
from benchmarks.pacer import Pacer, Seat


def run(seat: Seat, pacer: Pacer) -> None:
    """Steps for ever; the pacer ends it."""
    fabric = Fabric(accelerator="cpu", devices=seat.size, strategy="ddp" if seat.size > 1 else "auto")
    fabric.launch()
    net = tiny.network()
    net, optimizer = fabric.setup(net, tiny.optimizer(net))
    tiny.loop(net, optimizer, fabric.backward, seat, pacer)
