"""The phases of a training's time, and the number of steps that are kept."""

from __future__ import annotations

PHASES = (
    "data", "transfer", "forward", "backward", "communication", "update", "watching",
    "evaluation", "checkpoint", "start",
)  # fmt: skip
(
    DATA, TRANSFER, FORWARD, BACKWARD, COMMUNICATION, UPDATE, WATCHING, EVALUATION, CHECKPOINT, START,
) = range(len(PHASES))  # fmt: skip
IN_A_STEP = PHASES[: WATCHING + 1]
"""The phases that make up a step; the others lie between steps."""

WARMUP = 5  # steps that are left out of medians: caches fill, kernels are chosen
KEPT = 1024  # steps in a block that is summed up
