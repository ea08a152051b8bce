"""Reads a checkpoint's tensors as one model, however many processes wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from grappe.checkpoint.names import AVERAGE, LOCAL, MODEL
from grappe.checkpoint.weights import Under, Weights, agreed

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
