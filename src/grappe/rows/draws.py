"""Rules of random numbers: drawn for all rows on every process, which keeps its own, or passes over the others'."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from grappe.rows.context import NOW
from grappe.rows.layout import Placement, TensorLayout, is_dense, layout_of
from grappe.rows.messages import own_part
from grappe.rows.plans import procedure
from grappe.rows.tensor import Rows, own_memory, wrapped, written

_SCRATCH = 1 << 13  # 64 kB: more would be asked of the system at each draw


@procedure("bernoulli_ uniform_ normal_ exponential_ random_ geometric_ log_normal_ cauchy_")
def _filled(operator: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    cell = value._cell if type(value) is Rows else None
    layout = cell.layout if cell is not None else None
    if layout is None or type(layout.placement) is not Placement or any(isinstance(each, Tensor) for each in rest):
        return NotImplemented
    own_memory(cell)  # type: ignore[arg-type]
    if NOW.context.exchanges or not fill_own(operator, cell.local, layout, tuple(rest), options):  # type: ignore[union-attr]
        cell.local.copy_(own_part(_all_rows(operator, layout, rest, options), layout.placement))  # type: ignore[union-attr]
    return written(value)


def _all_rows(operator: Any, layout: TensorLayout, rest: Any, options: Any) -> Tensor:
    drawn = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    made = NOW.context.draw(operator, drawn, *rest, **options)
    return made if isinstance(made, Tensor) else drawn


@procedure("rand_like randn_like randint_like bernoulli.p")
def _like(operator: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    layout = value._cell.layout
    made = _all_rows(operator, layout, rest, options)
    if type(layout.placement) is not Placement:
        return made
    return _own(made, layout.placement)


def _own(every: Tensor, placement: Placement) -> Any:
    layout = layout_of(every.shape, every.stride(), every.dtype, every.device, placement)
    return wrapped(own_part(every, placement).clone(), layout)  # cloned, or all rows would stay


@procedure("native_dropout")
def _native_dropout(operator: Any, arguments: Any, options: Any) -> Any:
    value, p, train = arguments
    layout = value._cell.layout
    placement = layout.placement
    if type(placement) is not Placement or train is False:
        return NotImplemented
    ones = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device).fill_(1)
    kept = _own(NOW.context.draw(operator, ones, p, True)[1], placement)
    return value * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


# ---- Passing over other rows' numbers ----------------------------------------------------------------------


def fill_own(operator: Any, local: Tensor, layout: TensorLayout, rest: tuple[Any, ...], options: Any) -> bool:
    """Draws own rows alone where the generator of a CPU can pass over the others'; returns whether it could."""
    words = None if options.get("generator") is not None else _words_around(operator, layout, rest)
    if words is None:
        return False
    pass_over(words[0])
    if local.numel():
        operator(local, *rest)
    pass_over(words[1])
    return True


@functools.lru_cache(maxsize=4096)
def _words_around(operator: Any, layout: TensorLayout, rest: tuple[Any, ...]) -> tuple[int, int] | None:
    """Returns the words of the generator before and after those of own rows; None if it cannot be told."""
    (dim, sizes, outer), stride = layout.placement, layout.stride
    first = all(each <= stride[dim] or size == 1 for each, size in zip(stride, layout.shape, strict=True))
    if layout.device.type != "cpu" or outer != 1 or not first or not is_dense(layout) or not sum(sizes):
        return None
    words = words_each(operator, layout.dtype, rest)
    if not words:
        return None
    each, before = words * (layout.shape.numel() // sum(sizes)), sum(sizes[: NOW.context.rank])
    return each * before, each * (sum(sizes) - before - layout.placement.rows)


class Probing:
    """Tells whether what is drawn only measures the generator, which modes that look at draws leave alone."""

    on = False


@functools.lru_cache(maxsize=256)
def words_each(operator: Any, dtype: torch.dtype, arguments: tuple[Any, ...]) -> int:
    """Returns how many words of the generator each number takes, if they are drawn one by one; otherwise 0.

    Numbers that are drawn in pairs, of which the second waits in the generator, are not passed over by words.
    """
    Probing.on = True
    try:
        for words in (1, 2):
            if all(_is_drawn_singly(operator, dtype, arguments, words, total, first) for total, first in _PROBES):
                return words
    finally:
        Probing.on = False
    return 0


_PROBES = ((40, 17), (40, 3), (40, 30), (9, 4))
"""Numbers drawn at once, and those of them that are passed over: normal_ takes 16 at once where there are as many."""


def _is_drawn_singly(operator: Any, dtype: Any, arguments: Any, words: int, total: int, first: int) -> bool:
    every, after = torch.empty(total, dtype=dtype), torch.empty(total - first, dtype=dtype)
    plain, passed = (torch.Generator().manual_seed(1) for _ in range(2))
    operator(every, *arguments, generator=plain)
    torch.empty(words * first, dtype=torch.int32).random_(generator=passed)
    operator(after, *arguments, generator=passed)
    return torch.equal(every[first:], after) and torch.equal(plain.get_state(), passed.get_state())


def pass_over(words: int) -> None:
    """Draws words that are for others, two at once: 3.3 ns for a number of bernoulli_, which itself takes 9 ns."""
    if words % 2:
        torch.empty(1, dtype=torch.int32).random_()
    left = words // 2
    scratch = torch.empty(min(left, _SCRATCH), dtype=torch.int64)
    while left:
        scratch = scratch[:left]
        left -= len(scratch.random_())
