"""Copies tensors to a GPU so that the host never waits, and batches while the kernels of the step before run.

Page-locked memory is torch's: `pin_memory()` takes a block of its caching host allocator, which rounds sizes up to a
power of two, keeps freed blocks, and gives a block away again when the copies from it have ended (an event on each
stream that it was copied on). So torch has the pool, and none is kept here: soon no more memory is locked.
A copy from other memory waits, for the kernels enqueued before it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grappe.private_api.torch import tree_map


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on `device`: on a GPU in the order of the current stream, without waiting."""
    if device.type == "cpu":
        return values
    return page_locked(values).to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Constant:
    """A tensor of few numbers that is needed again and again: sent to each device once."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._there: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the tensor on `device`."""
        if device.type == "cpu":
            return self._values
        copy = self._there.get(device)
        if copy is None:
            copy = sent(self._values, device)
            if type(copy) is Tensor:  # a fake tensor is useful to its own trace only
                self._there[device] = copy
        return copy


def page_locked(values: Tensor) -> Tensor:
    """Returns a CPU tensor in page-locked memory; the tensor itself if it is there already."""
    # Where elements share memory, as after expand(), torch refuses to write the copy.
    shared = any(not step and size > 1 for step, size in zip(values.stride(), values.shape, strict=True))
    return (values.contiguous() if shared else values).pin_memory()


def is_dense(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is a tensor that lies in one piece of memory: not sparse, not nested."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def on_device(leaf: Any, device: torch.device) -> Any:
    """A tensor, or a batch object that has a `to` (of graphs, of encodings), on `device`; else the leaf."""
    if not callable(getattr(leaf, "to", None)):
        return leaf
    # A copy to the host must wait: the values would be read before they arrive.
    return leaf.to(device, non_blocking=True) if device.type == "cuda" else leaf.to(device)


@functools.lru_cache(maxsize=8)
def copies_to(device: torch.device) -> Callable[[Any], Any]:
    """Returns what copies a batch, of any nesting, to a GPU: on a stream of its own, while kernels enqueued before run.

    Training and evaluation share the stream. The stream that computes waits for the copy by an event, the host for
    nothing. Memory on the GPU is allocated on the copy's stream; `record_stream` keeps it from being given to a later
    copy before the kernels that read it have ended. Objects with a `to` of their own, whose tensors cannot be recorded,
    and tensors that are not dense are copied on the stream that computes.
    """
    stream = torch.cuda.Stream(device)

    def copied(batch: Any) -> Any:
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            begun = tree_map(lambda leaf: sent(leaf, device) if is_dense(leaf) and leaf.is_cpu else leaf, batch)
        computing.wait_stream(stream)

        def handed_over(leaf: Any) -> Any:
            moved = on_device(leaf, device)
            if is_dense(moved) and moved.is_cuda:
                moved.record_stream(computing)
            return moved

        return tree_map(handed_over, begun)

    return copied
