"""An optimizer's state by parameter name, so that it can be saved, resharded and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grappe.weights import share

if TYPE_CHECKING:
    from grappe.engines.base import Saved


def save(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`optimizer.NAME.KEY` tensors, and what is no tensor as JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
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
            value = saved.tensors.read(f"optimizer.{name}.{key}")
            state[key] = _placed(value, parameter)
        if state:
            optimizer.state[parameter] = state


@torch.no_grad()
def _placed(value: Tensor, parameter: nn.Parameter) -> Tensor:
    if value.shape != parameter.shape or value.dim() == 0:
        return value.clone()  # a step counter, which optimizers keep on the CPU
    if isinstance(parameter, DTensor):
        return share(value, parameter)
    return torch.empty_like(parameter).copy_(value)
