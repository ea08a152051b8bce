"""SwiGLU as an operator of torch in C++: silu(gate) * x (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiglu import _C  # noqa: F401  registers the operators of csrc/


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """Computes silu(gate) * x, elementwise: two tensors of one shape, type and device to a third."""
    return torch.ops.swiglu.forward(gate, x)


def swiglu_in_python(gate: Tensor, x: Tensor) -> Tensor:
    """Computes the same with torch's own operators: what the one in C++ is compared with."""
    return F.silu(gate) * x


@torch.library.register_fake("swiglu::forward")
def _forward_shape(gate: Tensor, x: Tensor) -> Tensor:
    """Gives torch.compile and torch.export the shape without computing."""
    torch._check(gate.shape == x.shape)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("swiglu::backward")
def _backward_shape(grad: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.empty_like(x, memory_format=torch.contiguous_format)
    return shape, torch.empty_like(shape)


def _save(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
    return torch.ops.swiglu.backward(grad, *ctx.saved_tensors)


torch.library.register_autograd("swiglu::forward", _backward, setup_context=_save)
