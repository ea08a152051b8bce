"""Dropout's stream: a function of (seed, step, data slice), so that going on needs no generator's state."""

from __future__ import annotations

import torch

from grappe.data.draw import mix
from grappe.world import World


def seed_dropout(seed: int, step: int, world: World, *place: int) -> None:
    """Sets torch's generators for this process's slice of `step`; as torch.manual_seed, less its 150 microseconds.

    Args:
        place: what else tells this process from others of the same slice.
    """
    mine = mix(seed, step, world.data_rank, *place)
    torch.default_generator.manual_seed(mine)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index].manual_seed(mine)
