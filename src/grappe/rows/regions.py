"""Functions of autograd between rows and a process's own part, on which plain torch runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grappe.rows.layout import PARTIAL, Placement
from grappe.rows.tensor import from_local, full, own_of


class ToLocal(torch.autograd.Function):
    """From rows to this process's; gradients of these are the rows of a gradient."""

    @staticmethod
    def forward(ctx: Any, value: Any, placement: Placement) -> Tensor:
        ctx.placement = placement
        return own_of(value, placement).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return FromLocal.apply(grad, ctx.placement), None


class FromLocal(torch.autograd.Function):
    """From this process's rows, or its term of a sum, to rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, placement: Any, stride: Any = None) -> Any:
        ctx.placement = placement
        return from_local(local, placement, stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return (ToLocal.apply(grad, ctx.placement) if type(ctx.placement) is Placement else full(grad)), None, None


class Shared(torch.autograd.Function):
    """A parameter that all processes have: the gradients of their rows are terms of a sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return FromLocal.apply(grad, PARTIAL)
