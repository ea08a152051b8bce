"""HostCopy: copies a tensor from the device now, to be read a step later, so that host and device do not wait."""

from __future__ import annotations

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
