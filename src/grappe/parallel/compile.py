"""Compilation: torch.compile on each unit, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def compile_units(units: Sequence[nn.Module]) -> None:
    """Compiles each unit separately: equal blocks are compiled once, and names stay the same."""
    for unit in units:
        unit.compile()
