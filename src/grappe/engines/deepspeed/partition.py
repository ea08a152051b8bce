"""Makes a model whose parameters are partitioned from the beginning: no process ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from grappe.checkpoint.weights import Weights, named_tensors, read_into
from grappe.engines.deepspeed.settings import Settings
from grappe.errors import TaskError
from grappe.private_api.torch import module_buffers, module_parameters


def partitioned(model: nn.Module, weights: Weights, device: torch.device, settings: Settings) -> None:
    """Fills a model on the meta device with its buffers, and with parameters that zero.Init partitions. Collective.

    Raises:
        TaskError: a parameter or buffer has no value in `weights`, or another shape.
    """
    import deepspeed

    _check(model, weights)
    deepspeed.zero.Init(module=_OneByOne(model, weights, device), config_dict_or_path=settings)
    _fill_buffers(model, weights, device)


def _check(model: nn.Module, weights: Weights) -> None:
    for name, tensor in named_tensors(model).items():
        if name not in weights:
            raise TaskError(f"the model has '{name}', the weights do not: are they another model's?")
        if weights.shape(name) != tuple(tensor.shape):
            raise TaskError(
                f"'{name}' is {list(tensor.shape)} in the model and {list(weights.shape(name))} in the weights: "
                "does model() make the same one whenever it is called?"
            )


class _OneByOne(nn.Module):
    """Stand-in for a module in zero.Init; each parameter gets its memory and values when it is requested.

    zero.Init partitions a parameter before it requests the next.
    """

    def __init__(self, model: nn.Module, weights: Weights, device: torch.device) -> None:
        super().__init__()
        # Not as a submodule: Init would look for buffers there.
        self.__dict__["made"] = lambda: _made(model, weights, device)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.__dict__["made"]()


def _made(model: nn.Module, weights: Weights, device: torch.device) -> Iterator[nn.Parameter]:
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module_parameters(module).items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((module, name))
    for full, parameter in list(model.named_parameters()):
        real = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
            requires_grad=parameter.requires_grad,
        )
        read_into(real, weights, full)
        for module, name in sites[id(parameter)]:
            module_parameters(module)[name] = real
        yield real


def _fill_buffers(model: nn.Module, weights: Weights, device: torch.device) -> None:
    made: dict[int, Any] = {}
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    for module in model.modules():
        for name, buffer in module_buffers(module).items():
            if buffer is None:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = real = torch.empty_like(buffer, device=device)
                read_into(real, weights, names[id(buffer)])
            module_buffers(module)[name] = made[id(buffer)]
