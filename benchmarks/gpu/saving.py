"""Time for which a checkpoint of a large state blocks the training."""

from __future__ import annotations

import statistics

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Tokens
from benchmarks.gpu.training import train

EVERY, STEPS = 15, 46


def main(part: Part) -> None:
    """Saves GPT-2 124M's shape made wider (5 GB of weights and moments) on a GPU, a tiny one on a CPU."""
    if part.on_gpu:
        task = Tokens(width=1536, depth=12, heads=24, batch_size=16)
    else:
        task = Tokens(width=64, depth=2, heads=2, vocabulary=512, context=64, batch_size=4, samples=256)
    state = 3 * 4 * sum(parameter.numel() for parameter in task.model().parameters())
    run = train(part, task, "precision=bf16", "saving", steps=STEPS, save_every=EVERY, evaluate_every=10**9)
    seconds = {record["step"]: record["seconds"] for record in run.records("step")}
    plain = statistics.median(seconds.values())
    stalls = [
        max(seconds.get(step + after, 0.0) - plain for after in (0, 1, 2))
        for step in range(EVERY, STEPS, EVERY)
    ]
    part.measured(
        "stall of a save",
        f"{max(stalls[1:]) * 1e3:.0f} ms at most, for {state / 1e9:.2f} GB of state; a step takes {plain * 1e3:.0f} ms",
        stall_seconds=max(stalls[1:]),
        state_bytes=state,
    )
