"""Accelerate: the same loop through its wrappers."""

from __future__ import annotations

from accelerate import Accelerator

from benchmarks import tiny
from benchmarks.pacer import Pacer, Seat


def run(seat: Seat, pacer: Pacer) -> None:
    """Steps for ever; the pacer ends it."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == seat.size
    net = tiny.network()
    net, optimizer = accelerator.prepare(net, tiny.optimizer(net))
    tiny.loop(net, optimizer, accelerator.backward, seat, pacer)
