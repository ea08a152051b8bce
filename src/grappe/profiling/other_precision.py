"""Tries matrix products of a traced step in another precision."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grappe.private_api.torch import tree_leaves, tree_map


class Weights:
    """This process's parameters, to be told from activations where tensors are cast."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        own = [one.to_local() if hasattr(one, "to_local") else one for _, one in parameters]
        self._places = {_place(one) for one in own}
        self._shapes = {one.shape for one in own}

    def read(self, tensor: Tensor) -> bool:
        """Returns whether the tensor is a parameter, or a view of one."""
        return _place(tensor) in self._places

    def like(self, tensor: Tensor) -> bool:
        """Returns whether the tensor has a parameter's shape, as its gradient has, or that of its transpose."""
        return tensor.shape in self._shapes or (tensor.dim() == 2 and tensor.t().shape in self._shapes)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def seconds_in(
    dtype: torch.dtype, func: Any, args: Any, keywords: Any, weights: Weights, forward: bool
) -> float | None:
    """Times an operator whose tensors have another floating type; None: it does not take that type.

    As under autocast: activations have that type already; parameters are cast in forward, their gradients in backward.
    """
    casting = 0.0

    def cast(leaf: Any) -> Any:
        nonlocal casting
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        began = time.perf_counter()
        made = leaf.to(dtype)
        if forward and weights.read(leaf):
            casting += time.perf_counter() - began
        return made

    try:
        arguments, named = tree_map(cast, (args, keywords))
        func(*arguments, **named)  # what is prepared for a first call
        began = time.perf_counter()
        output = func(*arguments, **named)
        if not forward:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and weights.like(leaf):
                    leaf.float()
        return time.perf_counter() - began + casting
    except (RuntimeError, NotImplementedError):
        return None
