"""Reads named tensors one at a time, from files or from memory; each process reads only the parts that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grappe.private_api.torch import local_shape_and_offset

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

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        ...

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """The part of the tensor that begins at `offset` and has `shape`, on the CPU."""
        ...


class InMemory:
    """Weights held in a mapping."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return self._tensors[name][
            tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        ]


class Under:
    """The weights whose names start with a prefix; the prefix is removed from the names."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._weights

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return iter([name[start:] for name in self._weights if name.startswith(self._prefix)])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._prefix + name)

    def read(self, name: str) -> Tensor:
        return self._weights.read(self._prefix + name)

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return self._weights.read_part(self._prefix + name, shape, offset)


class Without:
    """The weights, without those whose names start with a prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __contains__(self, name: str) -> bool:
        return not name.startswith(self._prefix) and name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._weights if not name.startswith(self._prefix)])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str) -> Tensor:
        return self._weights.read(name)

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return self._weights.read_part(name, shape, offset)


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
    if not isinstance(target, DTensor):
        target.copy_(weights.read(name))
        return
    shape, offset = local_shape_and_offset(target)
    local = target.to_local()
    if local.numel():
        local.copy_(weights.read_part(name, shape, offset))


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on the CPU. Collective if the tensor is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def kind_of(dtype: torch.dtype) -> str:
    """Names the kind of a type's numbers: tensors of two kinds are never each other's values."""
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "decimal"
    return "truth" if dtype == torch.bool else "whole"


NOTHING = "\0"  # what no name begins with


class ModelWeights:
    """Parameters and buffers of a model; a buffer that differs between processes is their mean.

    Names: `model.NAME` for parameters, `average.NAME` for their moving averages, `local.SLICE.NAME` for buffers.

    Args:
        averaged: take the averages of the parameters that have one.
    """

    def __init__(self, tensors: Weights, *, averaged: bool = False) -> None:
        self._parameters = Under(tensors, MODEL)
        self._averages = Under(tensors, AVERAGE if averaged else NOTHING)
        self._tensors = tensors
        self._buffers: dict[str, list[str]] = {}
        for full in tensors:
            if full.startswith(LOCAL):
                name = full.removeprefix(LOCAL).partition(".")[2]
                self._buffers.setdefault(name, []).append(full)

    def __contains__(self, name: str) -> bool:
        return name in self._buffers or name in self._parameters

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._buffers

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._buffers:
            return self._tensors.shape(self._buffers[name][0])
        return self._parameters.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._buffers:
            return self._source(name).read(name)
        return agreed([self._tensors.read(full) for full in sorted(self._buffers[name])])

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return self._source(name).read_part(name, shape, offset)

    def _source(self, name: str) -> Weights:
        return self._averages if name in self._averages else self._parameters
