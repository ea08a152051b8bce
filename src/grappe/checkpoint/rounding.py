"""Rounds a model's matrices to bf16 or int8, as an exported program may store them; it computes in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grappe.checkpoint.weights import InMemory, Weights, named_tensors
from grappe.plan import Rounding

LARGEST = 127  # of int8, symmetric: -128 is not used


def stored(tensor: Tensor, rounding: Rounding) -> tuple[Tensor, ...]:
    """Rounds a tensor: to its values, and with int8 a scale for each row of its first dimension, [N, 1, ...].

    A tensor of one dimension (a bias, a normalisation's scale) and one of whole numbers stay as they are.
    """
    if rounding == "fp32" or tensor.dim() < 2 or not tensor.is_floating_point():
        return (tensor,)
    if rounding == "bf16":
        return (tensor.bfloat16(),)
    largest = tensor.abs().amax(tuple(range(1, tensor.dim())), keepdim=True)
    scale = (largest / LARGEST).clamp(min=torch.finfo(tensor.dtype).tiny)
    return (tensor / scale).round().to(torch.int8), scale


def restored(values: Tensor, *scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the tensor that `stored` has rounded, of its former type."""
    wide = values.to(dtype)
    return wide * scale[0] if scale else wide


def rounded(weights: Weights, rounding: Rounding) -> Weights:
    """Returns weights with the values that they have after rounding."""
    if rounding == "fp32":
        return weights
    tensors = {name: weights.read(name) for name in weights}
    return InMemory({name: restored(*stored(tensor, rounding), dtype=tensor.dtype) for name, tensor in tensors.items()})


class RoundedProgram(nn.Module):
    """A program whose matrices are stored rounded, and computed again in each call.

    Args:
        program: its own tensors get the rounded values: it predicts what this module predicts.
    """

    def __init__(self, program: nn.Module, rounding: Rounding) -> None:
        super().__init__()
        self._program = (program,)  # in a tuple: its float32 matrices are no part of this module
        self._parts: dict[str, tuple[torch.dtype, list[str]]] = {}
        for number, (name, tensor) in enumerate(named_tensors(program).items()):
            parts = [part.detach().clone() for part in stored(tensor, rounding)]
            self._parts[name] = tensor.dtype, [f"stored_{number}_{place}" for place in range(len(parts))]
            for buffer, part in zip(self._parts[name][1], parts, strict=True):
                self.register_buffer(buffer, part)
            with torch.no_grad():
                tensor.copy_(restored(*parts, dtype=tensor.dtype))

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        tensors = {
            name: restored(*map(self.get_buffer, buffers), dtype=dtype)
            for name, (dtype, buffers) in self._parts.items()
        }
        return torch.func.functional_call(self._program[0], tensors, leaves)
