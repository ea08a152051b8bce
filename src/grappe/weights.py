"""Weights: named tensors that are read one at a time, from files or from memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from grappe.errors import RunError


class Weights(Protocol):
    """A source of whole tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        ...


class InMemory:
    """Weights held in a mapping."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class InFiles:
    """Weights in safetensors files, mapped into memory and read when asked for.

    Raises:
        RunError: a file is not a readable safetensors file.
    """

    def __init__(self, files: Iterable[Path], prefix: str = "") -> None:
        self._prefix = prefix
        self._handles = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except Exception as error:  # the library's own error class is not public
                raise RunError(f"{file} is not a readable safetensors file: {error}") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._handles

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return iter([name[start:] for name in self._handles if name.startswith(self._prefix)])

    def read(self, name: str) -> Tensor:
        return self._handles[self._prefix + name].get_tensor(self._prefix + name)

    def under(self, prefix: str) -> InFiles:
        """The tensors whose names start with `prefix`, without it."""
        view = object.__new__(InFiles)
        view._prefix, view._handles = self._prefix + prefix, self._handles
        return view


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, non-persistent ones too, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def copy_into(target: Tensor, whole: Tensor) -> None:
    """Copies the whole tensor, or this process's share of it, into `target`."""
    if isinstance(target, DTensor):
        target._local_tensor.copy_(share(whole, target)._local_tensor)
    else:
        target.copy_(whole)


def share(whole: Tensor, like: DTensor) -> DTensor:
    """This process's share of a CPU tensor that every process has, placed as `like` is. No communication."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU. Collective where it is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()
