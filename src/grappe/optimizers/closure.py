"""Calls the closure that an optimizer's step may be given; Lightning gives one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Returns what the closure does, called with gradients as torch's optimizers call it; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
