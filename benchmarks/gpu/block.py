"""Blocks of a 7B model's shape in bf16: tokens/s of grappe and of a loop by hand, as shares of the device's peaks."""

from __future__ import annotations

from benchmarks.gpu.llama import Llama
from benchmarks.gpu.part import Part
from benchmarks.gpu.rates import compare

PLANS = ("precision=bf16", "precision=bf16,compile")
"""The first alone is tried on a CPU."""
AIM = 0.47


def main(part: Part) -> None:
    """Measures three blocks on a GPU, small ones on a CPU."""
    if part.on_gpu:
        compare(part, "7B-shaped blocks", Llama(), PLANS, AIM, warmup=6, steps=15)
        return
    tiny = Llama(width=64, depth=2, heads=2, hidden=172, vocabulary=64, context=32, batch_size=2, samples=16)
    compare(part, "7B's shape, tiny", tiny, PLANS[:1], AIM, warmup=5, steps=20)
    for plan in PLANS[1:]:
        part.not_tried(f"7B-shaped blocks, {plan}", "on a GPU only: the part parity compiles on a CPU, too")
