"""GPT-2 124M in bf16: tokens/s of grappe and of a loop written by hand, as shares of the device's peaks."""

from __future__ import annotations

from benchmarks.gpu.part import Part
from benchmarks.gpu.rates import compare
from benchmarks.gpu.tasks import Tokens

PLANS = ("precision=bf16", "precision=bf16,compile", "precision=bf16,compile,cuda_graphs")
"""The first alone is tried on a CPU."""
AIM = 0.52


def main(part: Part) -> None:
    """Measures GPT-2 124M on a GPU, a tiny one on a CPU."""
    if part.on_gpu:
        compare(part, "GPT-2 124M", Tokens(), PLANS, AIM, warmup=10, steps=30)
        return
    tiny = Tokens(width=64, depth=2, heads=2, vocabulary=512, context=64, batch_size=4, samples=256)
    compare(part, "GPT-2's shape, tiny", tiny, PLANS[:1], AIM, warmup=5, steps=20)
    for plan in PLANS[1:]:
        part.not_tried(f"GPT-2's shape, {plan}", "on a GPU only: the part parity compiles on a CPU, too")
