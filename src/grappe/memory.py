"""Memory: what a process holds for its part of a model, to the byte, and what it has held at most."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of this process's part of `tensors`; None among them counts nothing."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            total += local.numel() * local.element_size()
    return total


def held(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes by kind: an optimizer's parameters, their gradients now, and its state."""
    import torch

    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    state = [
        value
        for of_one in optimizer.state.values()
        for value in (of_one.values() if isinstance(of_one, dict) else ())
        if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(one.grad for one in parameters),
        "optimizer": bytes_of(state),
    }


def peak(device: torch.device, status: Path = STATUS) -> dict[str, int]:
    """The most bytes so far: of the host's memory ("host", shared pages too), and of tensors on a GPU ("device")."""
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        found["host"] = int(lines["VmHWM"].split()[0]) * 1024
    if device.type == "cuda":
        import torch

        found["device"] = torch.cuda.max_memory_allocated(device)
    return found
