"""Mixing: which modules let one sample's output depend on the other samples of its batch, found by trying."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from grappe.parity.draws import Draws

RELATIVE = 1e-4
"""Rounding makes 1e-7 of a difference, batch statistics of half a batch a tenth."""


@torch.no_grad()
def mixing_modules(model: nn.Module, inputs: Any, rows: int) -> dict[str, bool]:
    """The innermost modules that mix the `rows` samples of `inputs` while training, by name.

    Batch normalisation does, and so does anything that takes a mean over the batch, whatever its class is called.

    Returns:
        Whether each stops mixing in evaluation.
    """
    if rows < 4:
        return {}
    model = copy.deepcopy(model).train()
    calls: dict[str, tuple[Any, Any]] = {}
    hooks = [
        module.register_forward_pre_hook(_keeper(calls, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    with Draws(off=True):
        model(inputs)
        for hook in hooks:
            hook.remove()
        found: dict[str, bool] = {}
        for name, module in reversed(list(model.named_modules())):
            inner = any(one.startswith(f"{name}.") or not name for one in found)
            if name in calls and not inner and _mixes(module, *calls[name], rows):
                found[name] = not _mixes(module.eval(), *calls[name], rows)
    return dict(sorted(found.items()))


def _keeper(calls: dict[str, tuple[Any, Any]], name: str) -> Any:
    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        # Modules that work in place would change what they were given.
        calls.setdefault(
            name, tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        )

    return keep


def _mixes(module: nn.Module, args: Any, kwargs: Any, rows: int) -> bool:
    """Whether the first half of the rows comes out otherwise without the second half."""
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.dim()]
    if not leaves or any(len(leaf) % rows for leaf in leaves):
        return False  # its first dimension is not the batch
    half = tree_map(lambda leaf: _head(leaf, rows), (args, kwargs))
    try:
        whole, part = _output(module, args, kwargs), _output(module, *half)
    except (RuntimeError, ValueError):
        return False
    for a, b in zip(whole, part, strict=False):
        head = a[: len(b)]
        if head.shape != b.shape or not torch.allclose(
            head, b, rtol=RELATIVE, atol=RELATIVE * float(head.abs().max())
        ):
            return True
    return False


def _head(leaf: Any, rows: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return leaf[: (rows // 2) * (len(leaf) // rows)].clone()


def _output(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    fresh = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    kept = kept_buffers(module)
    output = module(*fresh[0], **fresh[1])
    put_back(kept)
    return [
        leaf
        for leaf in tree_flatten(output)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()
    ]


Kept = list[tuple[nn.Module, str, Tensor, Tensor]]


def kept_buffers(module: nn.Module) -> Kept:
    """Every buffer as it is now: its module, its name there, itself, its values."""
    return [
        (one, name, buffer, buffer.clone())
        for one in module.modules()
        for name, buffer in one._buffers.items()
        if buffer is not None
    ]


@torch.no_grad()
def put_back(kept: Kept) -> None:
    """Makes the buffers what they were, also where a forward has put another tensor in their place."""
    for module, name, buffer, values in kept:
        buffer.copy_(values)
        module._buffers[name] = buffer
