"""Ties: parameters that several modules share; fully_shard must have all of such a parameter's modules together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


def untied(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Lists the units that share no parameter with a module outside of them, in order.

    FSDP2 makes a new parameter in each unit: one of two units would be two. The others are left to the root.
    """
    shared = shared_parameters(model)
    return [unit for unit in units if not _shares_outside(unit, shared)]


def shared_parameters(model: nn.Module) -> dict[int, set[int]]:
    """Returns the modules that have a parameter of their own that another has, too; both by id."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: several for parameter, several in owners.items() if len(several) > 1}


def _shares_outside(unit: nn.Module, shared: Mapping[int, set[int]]) -> bool:
    inside = {id(module) for module in unit.modules()}
    return any(shared.get(id(parameter), inside) - inside for parameter in unit.parameters())
