"""Regions: recurrent layers that run in plain torch on own rows, between two functions of autograd."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.private_api.torch import tree_leaves
from grappe.rows.context import NOW, GatheredAt
from grappe.rows.layout import PARTIAL, Placement, dense_stride, layout_of
from grappe.rows.messages import own_part
from grappe.rows.tensor import Cell, Rows, fitted, full, own_of, rows_of


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
        shape = local.shape
        if type(placement) is Placement:
            total = placement.outer * placement.total
            shape = torch.Size((*shape[: placement.dim], total, *shape[placement.dim + 1 :]))
        # Contiguous: an own part of one row, or of none, does not tell how the rows lie in memory.
        stride = dense_stride(shape, [0] * len(shape)) if stride is None else stride
        layout = layout_of(shape, stride, local.dtype, local.device, placement)
        return rows_of(Cell(fitted(local.detach(), layout), layout))

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


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        return full(value).clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return _Gathered.apply(value) if type(value) is Rows else value


def _of_all_rows(layers: Any, kind: str, arguments: Any) -> Any:
    """Runs recurrent layers on all rows, on every process: it is counted as operators are."""
    now = NOW.context
    at, started = GatheredAt(kind, now.line()), time.perf_counter()
    made = layers(*map(_plain, arguments))
    if any(type(each) is Rows for each in tree_leaves(arguments)):
        now.gathered[at] += 1
        now.seconds[at] += time.perf_counter() - started  # type: ignore[assignment]
    return made


def recurrent(layers: Any, kind: str) -> Any:
    """Returns what runs instead of a function of torch for recurrent layers: layer by layer, each on own rows.

    Dropout between the layers is that of all rows.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
    """

    def run(*arguments: Any) -> Any:
        from grappe.rows.own import as_rows  # it is made of this module

        arguments = (*map(as_rows, arguments[:2]), *arguments[2:])
        if not isinstance(arguments[2], (list, tuple)) or type(arguments[0]) is not Rows or arguments[0].dim() != 3:
            return _of_all_rows(layers, kind, arguments)  # packed, or no rows
        value, state, weights, bias, number, dropout, training, both, batch_first = arguments
        states = state if isinstance(state, (tuple, list)) else (state,)
        steps = value.transpose(0, 1) if batch_first else value
        placement = steps._cell.layout.placement
        if type(placement) is not Placement or placement.dim != 1 or 0 in placement.sizes:
            return _of_all_rows(layers, kind, arguments)
        ways, each = 2 if both else 1, len(weights) // number
        ends: list[list[Any]] = [[] for _ in states]
        for layer in range(number):
            at = slice(layer * ways, (layer + 1) * ways)
            own_states = [
                ToLocal.apply(every[at], placement) if type(every) is Rows else own_part(every[at], placement)
                for every in states
            ]
            made = layers(
                ToLocal.apply(steps, placement),
                tuple(own_states) if kind == "lstm" else own_states[0],
                [Shared.apply(weight) for weight in weights[layer * each : (layer + 1) * each]],
                bias, 1, 0.0, training, both, False,
            )  # fmt: skip
            steps = FromLocal.apply(made[0], placement)
            for end, last in zip(ends, made[1:], strict=True):
                end.append(FromLocal.apply(last, placement))
            if dropout and training and layer < number - 1:
                steps = F.dropout(steps, dropout, True)
        last_states = [end[0] if number == 1 else torch.cat(end) for end in ends]
        return (steps.transpose(0, 1) if batch_first else steps, *last_states)

    return run
