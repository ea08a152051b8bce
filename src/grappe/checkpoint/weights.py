"""Reads named tensors one at a time, each process its own parts; rounds them as an exported program may store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.plan import Rounding
from grappe.private_api.torch import is_dtensor, local_shape_and_offset

MODEL = "model."
"""`model.NAME`: a parameter, whole or in pieces that several processes wrote."""
AVERAGE = "average."
"""`average.NAME`: the moving average of a parameter, where the task has `ema`."""
OPTIMIZER = "optimizer."
"""`optimizer.NAME.KEY`: the optimizer's state `KEY` of the parameter `NAME`."""
LOCAL = "local."
"""`local.SLICE.NAME`: a buffer `NAME` of the processes that train on slice `SLICE` of a batch."""


class Weights(Protocol):
    """A source of tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's type, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        ...

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """The part of the tensor that begins at `offset` and has `shape`, on the CPU."""
        return self.read(name)[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


class InMemory(Weights):
    """Weights held in a mapping."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class Renamed:
    """Tensors of other weights, each under a name of its own.

    Args:
        sources: by the new name, the weights that have the tensor, and its name there.
    """

    def __init__(self, sources: Mapping[str, tuple[Weights, str]]) -> None:
        self._sources = sources

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        weights, own_name = self._sources[name]
        return weights.shape(own_name)

    def dtype(self, name: str) -> torch.dtype:
        weights, own_name = self._sources[name]
        return weights.dtype(own_name)

    def read(self, name: str) -> Tensor:
        weights, own_name = self._sources[name]
        return weights.read(own_name)

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        weights, own_name = self._sources[name]
        return weights.read_part(own_name, shape, offset)


def without(weights: Weights, prefix: str) -> Weights:
    """Returns the weights, without those whose names start with a prefix."""
    return Renamed({name: (weights, name) for name in weights if not name.startswith(prefix)})


def agreed(buffers: Sequence[Tensor]) -> Tensor:
    """Returns the mean of the processes' buffers; where all are equal, the buffer itself, bit for bit."""
    first = buffers[0]
    if len(buffers) == 1 or not first.is_floating_point():
        return first
    stacked = torch.stack(list(buffers))
    return torch.where((stacked == first).all(0), first, stacked.mean(0))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers, each once, non-persistent buffers included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def read_into(target: Tensor, weights: Weights, name: str) -> None:
    """Copies the tensor `name` into `target`; of a sharded `target`, this process's part."""
    if not is_dtensor(target):
        target.copy_(weights.read(name))
        return
    shape, offset = local_shape_and_offset(target)
    local = target.to_local()
    if local.numel():
        local.copy_(weights.read_part(name, shape, offset))


def decimal_types(model: nn.Module, weights: Weights) -> tuple[torch.dtype, torch.dtype]:
    """Returns the type of the model's first decimal parameter, and its type in `weights`."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and name in weights:
            return parameter.dtype, weights.dtype(name)
    return torch.float32, torch.float32


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on the CPU. Collective if the tensor is sharded."""
    return gathered(tensor).detach().cpu()


def gathered(tensor: Tensor) -> Tensor:
    """Returns the whole tensor where its parts are. Collective if the tensor is sharded.

    gloo gathers a DTensor's parts from the host's memory alone: of parts on a GPU torch 2.11 ended by SIGSEGV.
    """
    if not is_dtensor(tensor):
        return tensor
    group = tensor.device_mesh.get_group(0)
    if tensor.device.type == "cuda" and "cuda:nccl" not in dist.get_backend_config(group):
        on_host: Any = tensor.cpu()
        return on_host.full_tensor().to(tensor.device)
    return tensor.full_tensor()


def kind_of(dtype: torch.dtype) -> str:
    """Names the kind of a type's numbers: tensors of two kinds are never each other's values."""
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "decimal"
    return "truth" if dtype == torch.bool else "whole"


class ModelWeights(Renamed):
    """Parameters and buffers of a model; a buffer that differs between processes is their mean.

    Names: `model.NAME` for parameters, `average.NAME` for their moving averages, `local.SLICE.NAME` for buffers.

    Args:
        averaged: take the averages of the parameters that have one.
    """

    def __init__(self, tensors: Weights, *, averaged: bool = False) -> None:
        names, self._buffers = {}, dict[str, list[str]]()
        for full in tensors:
            if full.startswith(MODEL):
                name = full.removeprefix(MODEL)
                names[name] = AVERAGE + name if averaged and AVERAGE + name in tensors else full
            elif full.startswith(LOCAL):
                self._buffers.setdefault(full.removeprefix(LOCAL).partition(".")[2], []).append(full)
        names |= {name: fulls[0] for name, fulls in self._buffers.items()}
        super().__init__({name: (tensors, full) for name, full in names.items()})

    def read(self, name: str) -> Tensor:
        if name not in self._buffers:
            return super().read(name)
        return agreed([self._sources[name][0].read(full) for full in sorted(self._buffers[name])])


LARGEST = 127  # of int8, symmetric: -128 is not used


def stored(tensor: Tensor, rounding: Rounding) -> tuple[Tensor, ...]:
    """Rounds a tensor: to its values, and with int8 a scale for each row of its first dimension, [N, 1, ...].

    A tensor of one dimension (a bias, a normalisation's scale) and one of whole numbers stay as they are.
    """
    if rounding == "fp32" or tensor.dim() < 2 or not tensor.is_floating_point():
        return (tensor,)
    if rounding == "bf16":
        return (tensor.bfloat16(),)
    largest = tensor.abs().amax(tuple(range(1, tensor.dim())), keepdim=True)
    scale = (largest / LARGEST).clamp(min=torch.finfo(tensor.dtype).tiny)
    return (tensor / scale).round().to(torch.int8), scale


def restored(values: Tensor, *scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the tensor that `stored` has rounded, of its former type."""
    wide = values.to(dtype)
    return wide * scale[0] if scale else wide


def rounded(weights: Weights, rounding: Rounding) -> Weights:
    """Returns weights with the values that they have after rounding."""
    if rounding == "fp32":
        return weights
    tensors = {name: weights.read(name) for name in weights}
    return InMemory({name: restored(*stored(tensor, rounding), dtype=tensor.dtype) for name, tensor in tensors.items()})
