"""Ties: parameters that several modules share; fully_shard must have all of such a parameter's modules together."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from torch import nn


def untied(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Lists the units that share neither a parameter with a module outside of them nor a module, in order.

    FSDP2 makes a new parameter in each unit: one of two units would be two. Units that are listed twice, or share a
    module, are left to the root, too; a unit may be inside another.
    """
    shared = shared_parameters(model)
    inside = [{id(module) for module in unit.modules()} for unit in units]
    times = collections.Counter(module for modules in inside for module in modules)

    def is_alone(number: int) -> bool:
        mine, unit = inside[number], units[number]
        if any(shared.get(id(parameter), mine) - mine for parameter in unit.parameters()):
            return False
        return max(times[module] for module in mine) == 1 or not any(
            other != number
            and not mine.isdisjoint(modules)
            and not _nested(unit, mine, units[other], modules)
            for other, modules in enumerate(inside)
        )

    return [unit for number, unit in enumerate(units) if is_alone(number)]


def shared_parameters(model: nn.Module) -> dict[int, set[int]]:
    """Returns the modules that have a parameter of their own that another has, too; both by id."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: several for parameter, several in owners.items() if len(several) > 1}


def _nested(unit: nn.Module, mine: set[int], other: nn.Module, theirs: set[int]) -> bool:
    return unit is not other and (id(other) in mine or id(unit) in theirs)
