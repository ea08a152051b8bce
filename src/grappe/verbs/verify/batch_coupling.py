"""Batch coupling: finds, by trials, modules in which a sample's output depends on the batch's other samples."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grappe.data.batch import inside
from grappe.engines.shared.carried import attributes_kept
from grappe.parallel.batchnorm import buffers_kept
from grappe.private_api.torch import BatchNormBase, tree_flatten, tree_leaves, tree_unflatten
from grappe.task import Call as ModelCall
from grappe.training.interception import copied
from grappe.verbs.verify.random_ops import RandomOps

RELATIVE = 1e-4
"""Rounding makes 1e-7 of a difference, batch statistics of half a batch a tenth."""
FEWEST_ROWS = 4

Call = tuple[Any, Any]
"""A module's arguments: (args, kwargs)."""
Dims = list[int | None]
"""By leaf: which of its dimensions is the batch; None: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchCoupling:
    """The modules of a model that couple a batch's samples."""

    modules: list[str]
    """The names of the innermost modules that couple samples while training."""
    independent_rows: bool
    """Whether each row of the model's output is known to depend only on its own row of the input."""


@torch.no_grad()
def batch_coupled_modules(
    model: nn.Module, call: ModelCall, part: Callable[[int, int], Any], rows: int
) -> BatchCoupling:
    """Tries every module of `model` with `rows` samples and with half of them.

    Batch normalisation couples samples, and so does every module that takes a mean over the batch, of any class.

    Args:
        call: the task's forward.
        part: returns the inputs of the rows from one number to another, as a batch of their own.
    """
    if rows < FEWEST_ROWS:
        return BatchCoupling(modules=[], independent_rows=False)
    model = copy.deepcopy(model).train()
    for module in model.modules():
        # A weight that begins at 0, as a residual block's last may, would hide the coupling.
        if isinstance(module, BatchNormBase) and module.affine and not module.weight.any():
            module.weight.fill_(1.0)
    with RandomOps(off=True), inside(None):
        calls = _calls(model, call, part(0, rows))
        try:
            half = _calls(model, call, part(0, rows // 2))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            half = {}
        modules: list[str] = []
        independent_rows = False
        for name, module in reversed(list(model.named_modules())):
            inner = any(inner_name.startswith(f"{name}.") or not name for inner_name in modules)
            dims = _batch_dims(calls.get(name), half.get(name), rows)
            if inner or (dims is None and not isinstance(module, BatchNormBase)):
                continue
            # A graph's nodes are not to be halved; batch normalisation is known by its class.
            coupled = dims is None or _couples(module, calls[name], dims, rows)
            independent_rows = not name and coupled is False
            if coupled:
                modules.append(name)
    return BatchCoupling(modules=sorted(modules), independent_rows=independent_rows)


def _calls(model: nn.Module, call: ModelCall, inputs: Any) -> dict[str, Call]:
    """Records each module's arguments at its first call."""
    calls: dict[str, Call] = {}
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(names[module], copied((args, kwargs)))

    with contextlib.ExitStack() as hooks, buffers_kept(model), attributes_kept(model):
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        call(model, copied(inputs))  # modules that work in place change them
    return calls


def _batch_dims(full: Call | None, half: Call | None, rows: int) -> Dims | None:
    """Finds the batch dimensions of a call's arguments; None: there is none, or another shape without any."""
    leaves, others = tree_leaves(full), tree_leaves(half)
    if full is None or half is None or len(leaves) != len(others):
        return None
    dims = [_batch_dim(leaf, other, rows) for leaf, other in zip(leaves, others, strict=True)]
    for leaf, other, dim in zip(leaves, others, dims, strict=True):
        if isinstance(leaf, Tensor) and dim is None and leaf.shape != other.shape:
            return None
    return dims if any(dim is not None for dim in dims) else None


def _batch_dim(full: Any, half: Any, rows: int) -> int | None:
    """Finds the dimension of a tensor that has half as many rows in `half`."""
    if not isinstance(full, Tensor) or not isinstance(half, Tensor) or full.dim() != half.dim():
        return None
    differ = [dim for dim, (a, b) in enumerate(zip(full.shape, half.shape, strict=True)) if a != b]
    fits = len(differ) == 1 and full.shape[differ[0]] * (rows // 2) == half.shape[differ[0]] * rows
    return differ[0] if fits else None


def _couples(module: nn.Module, call: Call, dims: Dims, rows: int) -> bool | None:
    """Returns whether the outputs of the first half of the rows change without the second half; None: unknown."""
    try:
        full, part = _outputs(module, call), _outputs(module, _part(call, dims, rows, rows // 2))
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    for a, b in zip(full, part, strict=False):
        if not isinstance(a, Tensor) or not a.is_floating_point() or not b.numel():
            continue
        dim = _batch_dim(a, b, rows)
        head = a if dim is None else _first(a, dim, rows, rows // 2)
        if head.shape != b.shape:
            return None
        most = float(head.abs().max())
        if math.isfinite(most) and not torch.allclose(head, b, rtol=RELATIVE, atol=RELATIVE * most):
            return True
    return False


def _part(call: Call, dims: Dims, rows: int, kept: int) -> Call:
    """Returns the call with the first `kept` of its rows only."""
    leaves, form = tree_flatten(call)
    cut = [leaf if dim is None else _first(leaf, dim, rows, kept) for leaf, dim in zip(leaves, dims, strict=True)]
    return tree_unflatten(cut, form)


def _first(leaf: Any, dim: int, rows: int, kept: int) -> Any:
    """Returns the part of the first `kept` of `rows` samples."""
    if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] % rows:
        return leaf
    return leaf.narrow(dim, 0, kept * (leaf.shape[dim] // rows))


def _outputs(module: nn.Module, call: Call) -> list[Any]:
    args, kwargs = copied(call)
    with buffers_kept(module), attributes_kept(module):
        return tree_flatten(module(*args, **kwargs))[0]
