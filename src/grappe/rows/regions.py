"""Regions: recurrent layers that run in plain torch on own rows, between two functions of autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.rows.rules import part
from grappe.rows.tensor import PARTIAL, Cell, Placement, Rows, full, own

# ---- Regions: plain torch on own rows, between two functions of autograd -----------------------------------


class ToLocal(torch.autograd.Function):
    """From rows to this process's; its gradient's rows become the whole's."""

    @staticmethod
    def forward(ctx: Any, value: Rows, place: Placement) -> Tensor:
        ctx.place = place
        return part(value, place, place.dim - value.dim()).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return FromLocal.apply(grad, ctx.place), None


class FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, place: Any) -> Any:
        ctx.place = place
        return Rows(Cell(local.detach(), place))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (ToLocal.apply(grad, ctx.place) if type(ctx.place) is Placement else full(grad)), None


class Shared(torch.autograd.Function):
    """A parameter that all processes have: the gradients of their rows are terms of a sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return FromLocal.apply(grad, PARTIAL)


def recurrent(layers: Any, kind: str) -> Any:
    """A recurrent layer of torch, layer by layer, with dropout of the whole batch between."""

    def run(*arguments: Any) -> Any:
        if not isinstance(arguments[2], list) or type(arguments[0]) is not Rows:  # packed, or whole
            return layers(*map(_plain, arguments))
        value, state, weights, bias, number, dropout, training, both, batch_first = arguments
        states = state if isinstance(state, (tuple, list)) else (state,)
        time_major = value.transpose(0, 1) if batch_first else value
        place = time_major._cell.place
        if type(place) is not Placement or place.dim != 1 or place.outer != 1:
            return layers(_plain(value), _plain(state), *arguments[2:])
        ways, each = 2 if both else 1, len(weights) // number
        ends: list[list[Any]] = [[] for _ in states]
        for layer in range(number):
            locals_ = [Shared.apply(w) for w in weights[layer * each : (layer + 1) * each]]
            parts_of = [
                ToLocal.apply(s[layer * ways : (layer + 1) * ways], place)
                if isinstance(s, Rows)
                else own(s[layer * ways : (layer + 1) * ways], place)
                for s in states
            ]
            made = layers(
                ToLocal.apply(time_major, place),
                tuple(parts_of) if kind == "lstm" else parts_of[0],
                locals_,
                bias,
                1,
                0.0,
                training,
                both,
                False,
            )
            time_major = FromLocal.apply(made[0], place)
            for end, last in zip(ends, made[1:], strict=True):
                end.append(FromLocal.apply(last, place))
            if dropout and training and layer < number - 1:
                time_major = F.dropout(time_major, dropout, True)
        last = [end[0] if number == 1 else torch.cat(end) for end in ends]
        return (time_major.transpose(0, 1) if batch_first else time_major, *last)

    return run


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        return full(value).clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return _Gather.apply(value) if type(value) is Rows else value
