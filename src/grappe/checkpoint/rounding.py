"""Rounds a model's matrices to bf16 or int8, as an exported program may store them; it computes in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from grappe.checkpoint.weights import InMemory, Weights
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
