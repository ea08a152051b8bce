"""Dropout's stream: a function of (seed, step, data slice), so that going on needs no generator's state."""

from __future__ import annotations

import functools

import torch

from grappe.data.draw import mix_steps
from grappe.world import World

BLOCK = 256


def seed_dropout(seed: int, step: int, world: World, *place: int) -> None:
    """Sets torch's generators for this process's slice of `step`; as torch.manual_seed, less its 150 microseconds.

    Args:
        place: what else tells this process from others of the same slice.
    """
    set_generators(_block(seed, step // BLOCK, world.data_rank, *place)[step % BLOCK], world.device)


def set_generators(key: int, device: torch.device) -> None:
    """Sets the CPU's generator and the device's."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


@functools.lru_cache(maxsize=8)
def _block(seed: int, number: int, *words: int) -> list[int]:
    """The seeds of BLOCK steps at once: one by one they take 5 microseconds each."""
    return mix_steps(seed, number * BLOCK, BLOCK, *words)
