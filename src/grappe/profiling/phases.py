"""The phases of a training's time, and the numbers of steps and seconds that a figure needs."""

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

LEAST_SECONDS = 30.0  # of a training, below which a phase's share is noise, and nobody gains by less
WARMUP = 5  # steps that are left out of medians: caches fill, kernels are chosen
KEPT = 1024  # steps in a block that is summed up
