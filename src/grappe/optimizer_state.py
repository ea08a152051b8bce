"""An optimizer's state by parameter name, so that it can be saved, resharded and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.weights import read_into

if TYPE_CHECKING:
    from grappe.engines.base import Saved


def save(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`optimizer.NAME.KEY` tensors, and what is no tensor as JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    parameters = dict(model.named_parameters())
    assert set(optimizer.state) <= set(parameters.values()), "a state without its parameter would be lost"
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            elif value is not None:
                plain.setdefault(name, {})[key] = value
    return tensors, {"optimizer": plain}


def load(model: nn.Module, optimizer: Optimizer, saved: Saved) -> None:
    """Puts the state back, each tensor placed as its parameter is where it has the parameter's shape."""
    by_name = dict(model.named_parameters())
    keys: dict[str, list[str]] = {}
    for full in saved.tensors:
        if full.startswith("optimizer."):
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            keys.setdefault(name, []).append(key)
    for name, parameter in by_name.items():
        state = dict(saved.values.get("optimizer", {}).get(name, {}))
        for key in keys.get(name, ()):
            state[key] = _read(saved, f"optimizer.{name}.{key}", parameter)
        if state:
            optimizer.state[parameter] = state


def _read(saved: Saved, name: str, parameter: nn.Parameter) -> Tensor:
    if saved.tensors.shape(name) != tuple(parameter.shape) or not parameter.dim():
        return saved.tensors.read(name).clone()  # a step counter, which optimizers keep on the CPU
    value = torch.empty_like(parameter, requires_grad=False)
    read_into(value, saved.tensors, name)
    return value
