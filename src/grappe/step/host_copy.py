"""HostCopy: copies a tensor from the device now, to be read a step later, so that host and device do not wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A tensor being copied from a GPU; on a CPU, the tensor itself."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        """Returns the tensor on the CPU; waits for the end of the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def host_copy(leaf: Any) -> Any:
    """Begins to copy a tensor that is changed in place later; returns anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return HostCopy(leaf if leaf.is_cuda else leaf.clone())


def read(leaf: Any) -> Any:
    """Returns the tensor of a HostCopy; anything else as it is."""
    return leaf.read() if isinstance(leaf, HostCopy) else leaf
