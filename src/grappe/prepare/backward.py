"""Backward from several roots with given gradients, without the checks that torch.autograd.backward makes each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _find_engine() -> Callable[..., Any] | None:
    """The autograd engine's own entry, which torch.autograd.backward ends in; torch's own code calls it too."""
    return getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)


_ENGINE = _find_engine()


def backward(roots: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Adds the gradient of sum(root . gradient) to the leaves; each gradient has its root's shape and type.

    torch.autograd.backward takes 35 microseconds to check what is known here to be right.
    """
    if _ENGINE is None or torch.compiler.is_compiling():
        torch.autograd.backward(roots, gradients)
    else:
        _ENGINE(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
