"""Rules of random numbers: drawn for all rows on every process, which keeps its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grappe.rows.rules import rule
from grappe.rows.tensor import Placement, own, wrap, written


# ---- Random numbers: one process's for the whole, of which each keeps its own ------------------------------
@rule("bernoulli_ uniform_ normal_ exponential_ random_ geometric_ log_normal_ cauchy_")
def _draw(function: Any, arguments: Any, options: Any) -> Any:
    value, cell = arguments[0], arguments[0]._cell
    if cell.ghost is not None or type(cell.place) is not Placement or any(isinstance(a, Tensor) for a in arguments[1:]):
        return NotImplemented
    drawn = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    function(drawn, *arguments[1:], **options)
    cell.local.copy_(own(drawn, cell.place))
    return written(value)


@rule("rand_like randn_like randint_like bernoulli.p")
def _draw_like(function: Any, arguments: Any, options: Any) -> Any:
    value, place = arguments[0], arguments[0]._cell.place
    drawn = function(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device),
        *arguments[1:],
        **options,
    )
    return wrap(own(drawn, place), place) if type(place) is Placement else drawn


@rule("native_dropout")
def _native_dropout(function: Any, arguments: Any, options: Any) -> Any:
    value, place = arguments[0], arguments[0]._cell.place
    if type(place) is not Placement:
        return NotImplemented
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    kept = own(function(ones, *arguments[1:])[1], place)
    return wrap(value._cell.local * kept / (1 - arguments[1]), place), wrap(kept, place)
