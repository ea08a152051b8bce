"""Reads, copies and sets the attributes of a model's modules that are no parameter, buffer or module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grappe.private_api.torch import tree_leaves

OF_MODULES = frozenset(vars(nn.Module()))
OF_LIBRARIES = ("ds_", "_external_params", "_fsdp", "_compiled_call_impl", "forward", "grappe_")
Place = tuple[str, str]
"""A module's name, and its attribute's."""
Attributes = dict[Place, Any]


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules whose classes are not all torch's, by name."""
    for path, module in model.named_modules():
        if not {base.__module__.partition(".")[0] for base in type(module).__mro__} <= {"torch", "builtins"}:
            yield path, module


def attributes(model: nn.Module) -> Attributes:
    """Returns what the modules of a model keep outside of parameters, buffers and modules."""
    return {
        (path, name): value
        for path, module in own_modules(model)
        for name, value in vars(module).items()
        if name not in OF_MODULES and not name.startswith(OF_LIBRARIES)
    }


def put_attributes(model: nn.Module, values: Attributes) -> None:
    """Gives the model these attributes, and no others."""
    homes = {path: vars(module) for path, module in own_modules(model)}
    for path, name in attributes(model).keys() - values.keys():
        del homes[path][name]
    for (path, name), value in values.items():
        homes[path][name] = value


def is_state(leaf: Any) -> bool:
    """Returns whether a leaf is a tensor that can go from one step to the next: no parameter, no part of a graph."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter | DTensor) and not leaf.requires_grad


def copied(values: Attributes) -> Attributes:
    """Copies tensors, generators and what they are nested in; everything else is shared."""
    others = [v for v in tree_leaves(values) if not (is_state(v) or isinstance(v, torch.Generator))]
    return copy.deepcopy(values, {id(other): other for other in others})


def copied_attributes(model: nn.Module) -> Attributes:
    """Returns copies of a model's attributes."""
    return copied(attributes(model))
