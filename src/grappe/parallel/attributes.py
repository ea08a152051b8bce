"""Reads, copies and sets the attributes of a model's modules that are no parameter, buffer or module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grappe.private_api.torch import is_dtensor, is_traced, tree_leaves

OF_MODULES = frozenset(vars(nn.Module()))
OF_LIBRARIES = ("ds_", "_external_params", "_fsdp", "_compiled_call_impl", "forward", "grappe_")
HOOKED = "_output_capturing_hooks_installed"
"""transformers' mark of a model whose modules have its hooks: it stays as long as they do, and no checkpoint has it."""
Place = tuple[str, str]
"""A module's name, and its attribute's."""
Attributes = dict[Place, Any]


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Returns the modules whose classes are not all torch's, by name."""
    return ((path, module) for path, module in model.named_modules() if _is_own(type(module)))


@functools.cache
def _is_own(kind: type) -> bool:
    return not {base.__module__.partition(".")[0] for base in kind.__mro__} <= {"torch", "builtins"}


def attributes(model: nn.Module) -> Attributes:
    """Returns what the modules of a model keep outside of parameters, buffers and modules."""
    return _attributes_in({path: vars(module) for path, module in own_modules(model)})


def put_attributes(model: nn.Module, values: Attributes) -> None:
    """Gives the model these attributes, and no others."""
    homes = {path: vars(module) for path, module in own_modules(model)}
    for path, name in _attributes_in(homes).keys() - values.keys():
        del homes[path][name]
    for (path, name), value in values.items():
        homes[path][name] = value


def _attributes_in(homes: Mapping[str, Mapping[str, Any]]) -> Attributes:
    return {
        (path, name): value
        for path, home in homes.items()
        for name, value in home.items()
        if name not in OF_MODULES and not name.startswith(OF_LIBRARIES) and name != HOOKED
    }


def is_state(leaf: Any) -> bool:
    """Returns whether a leaf is a tensor that can go from one step to the next: no parameter, no part of a graph."""
    plain = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not is_dtensor(leaf)
    return plain and not leaf.requires_grad


def copied(values: Attributes) -> Attributes:
    """Copies tensors, generators and what they are nested in; everything else is shared."""
    leaves = tree_leaves(values)
    memo = {id(v): v for v in leaves if not (is_state(v) or isinstance(v, torch.Generator))}
    # deepcopy of a traced tensor asks for the address of memory that it does not have, and the process may crash.
    memo |= {id(v): v.clone() for v in leaves if type(v) is not Tensor and isinstance(v, Tensor) and is_traced(v)}
    return copy.deepcopy(values, memo)


def copied_attributes(model: nn.Module) -> Attributes:
    """Returns copies of a model's attributes."""
    return copied(attributes(model))
