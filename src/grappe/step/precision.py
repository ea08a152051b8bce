"""Precision: autocast for bf16 and fp16, both TF32 flags, and loss scaling for fp16."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from grappe.data.whole_batch_draws import draw_outside_cudnn

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_STEPS = 2000  # as torch.amp.GradScaler


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context of the forward, which does nothing in fp32 and fp64. Parameters and reductions stay fp32 in it."""
    if precision not in LOWER:
        return contextlib.nullcontext()
    # The cache would keep casts of parameters alive across FSDP's resharding, and across steps of our own loop.
    return torch.autocast(device.type, dtype=LOWER[precision], cache_enabled=False)


def in_double(tensor: Tensor) -> Tensor:
    """Returns a tensor's numbers in float64, dense: of complex numbers the real and the imaginary parts."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()


def set_gpu_arithmetic(precision: str) -> None:
    """Enables TF32 with precision=tf32 alone, and lets steps repeat: convolutions add in a fixed order,
    and the dropout of recurrent layers draws from torch's generator."""
    allowed = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.deterministic = True
    draw_outside_cudnn()


class LossScale:
    """Loss scaling, which keeps fp16 gradients in range: the scale halves after an infinity, doubles after 2,000 good
    steps.

    Works like torch.amp.GradScaler, but a step is skipped depending on the norm of the whole gradient,
    which is the same on every process.
    """

    def __init__(self, precision: str) -> None:
        self.value = 2.0**16 if precision == "fp16" else 1.0
        self.is_dynamic = precision == "fp16"
        self._good = 0

    def update(self, skipped: bool) -> None:
        """Counts a step, and changes the scale if necessary."""
        if not self.is_dynamic:
            return
        self._good = 0 if skipped else self._good + 1
        if skipped:
            self.value /= 2
        elif self._good == GROWTH_STEPS:
            self.value, self._good = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
        return {"value": self.value, "good": self._good}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's JSON."""
        if self.is_dynamic and state:
            self.value, self._good = float(state["value"]), int(state["good"])
