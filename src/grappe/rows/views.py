"""Rules of views: what becomes of the rows' dimension, and of the arguments for an own part."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from grappe.private_api.torch import no_modes
from grappe.rows.gathered import REAL
from grappe.rows.layout import GHOST, PARTIAL, Placement
from grappe.rows.plans import TABLE, RuleCall, Way


def _view(decide: Any, call: RuleCall) -> Way | None:
    """Rule of a view, by what makes (placement, constants) of a call and its rows' placement; None gathers."""
    first = call.names[0]
    placement = call.first.placement
    if placement is GHOST:
        return None
    if placement is PARTIAL and call.name == "_conj":
        placement = None  # its conjugate bit would be lost where terms are added up
    if type(placement) is not Placement:
        return Way(at={first: placement}, results=placement, view=True, operator=REAL.get(call.operator))
    decided = decide(call, placement)
    if decided is None:
        return None
    results, constants, operator = (*decided, None)[:3]
    return Way(at={first: placement}, constants=constants, results=results, view=True, operator=operator)


def _viewed(call: RuleCall, placement: Placement) -> Any:
    if "dtype" in call.values:
        return (placement, {}) if placement.dim < len(call.first.shape) - 1 else None
    made = reshaped(call.first.local_shape, tuple(call["size"]), placement)
    return None if made is None else (made[0], {"size": made[1]}, lambda local, size, *_: local.view(size))


def _expanded(call: RuleCall, placement: Placement) -> Any:
    made = expanded(call.first.local_shape, tuple(call["size"]), placement)
    return None if made is None else (made[0], {"size": made[1]})


def reshaped(local_shape: Any, size: tuple[int, ...], placement: Placement) -> tuple[Placement, list[int]] | None:
    """Returns where the rows are in a new shape of all rows, and that of own ones; None: in no dimension of it.

    They are `before` x total x `after` numbers, in place and shape.
    """
    made = _reshaped(local_shape, size, placement)
    if made is None:
        return None
    moved, own = made
    return moved, [*own[: moved.dim], moved.outer * moved.rows, *own[moved.dim + 1 :]]


@functools.lru_cache(maxsize=20_000)
def _reshaped(local_shape: Any, size: tuple[int, ...], placement: Placement) -> tuple[Placement, list[int]] | None:
    shape = list(size)
    total = placement.total
    before = math.prod(local_shape[: placement.dim]) * placement.outer
    after = math.prod(local_shape[placement.dim + 1 :])
    numbers = before * total * after
    if -1 in shape:
        rest = -math.prod(shape)
        if not rest:
            return None
        shape[shape.index(-1)] = numbers // rest
    if not numbers or math.prod(shape) != numbers:
        return None
    for dim, length in enumerate(shape):
        ahead, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if before % ahead or total * after % behind or length != before // ahead * (total * after // behind):
            continue
        if any(each * after % behind for each in placement.sizes):
            continue
        return Placement(dim, tuple(each * after // behind for each in placement.sizes), before // ahead), shape
    return None


def place_after(
    function: Any, shape: Any, place: Placement, arguments: Any, options: Any, dtype: torch.dtype | None = None
) -> Placement | None:
    """Returns where the rows are in a view, or in each of several: torch is asked, with more rows than anything else.

    None: they are in no dimension, or not all of them.

    Args:
        shape: of the tensor, whatever its rows.
        arguments: after the tensor.
    """
    mark = 1 + 2 * max(*shape, place.outer * place.total)  # no part of another dimension, and beyond any part of rows
    sizes = (*shape[: place.dim], mark, *shape[place.dim + 1 :])
    try:
        with no_modes():
            made = function(torch.empty(sizes, dtype=dtype, device="meta"), *arguments, **options)
    except (RuntimeError, IndexError):
        return None
    first = made if isinstance(made, torch.Tensor) else made[0]
    return place._replace(dim=list(first.shape).index(mark)) if mark in first.shape else None


def _asked(call: RuleCall, placement: Placement) -> Any:
    (_, *arguments), options = call.arguments
    made = place_after(call.operator, call.first.shape, placement, arguments, options, call.first.dtype)
    return None if made is None else (made, {})


def expanded(local_shape: Any, size: tuple[int, ...], placement: Placement) -> tuple[Placement, list[int]] | None:
    """Returns where the rows are in a shape that all rows are expanded to, and that of own ones, as `reshaped`."""
    dim = placement.dim + len(size) - len(local_shape)
    if size[dim] not in (-1, placement.outer * placement.total):
        return None
    return placement._replace(dim=dim), [*size[:dim], -1, *size[dim + 1 :]]


def _squeezed(call: RuleCall, placement: Placement) -> Any:
    value = call.first
    dims = call.values.get("dim")
    dims = range(len(value.shape)) if dims is None else dims if isinstance(dims, list) else [dims]
    gone = {dim % len(value.shape) for dim in dims if value.shape[dim] == 1}
    if placement.dim in gone:
        return None
    left = placement._replace(dim=placement.dim - sum(dim < placement.dim for dim in gone))
    # By name, as an own part may have other dimensions of size 1.
    return left, {}, lambda local, *_: local.squeeze(tuple(gone))


def _sliced(call: RuleCall, placement: Placement) -> Any:
    value = call.first
    if call["dim"] % len(value.shape) != placement.dim:
        return placement, {}
    size, total = value.shape[placement.dim], placement.total
    start = 0 if call["start"] is None else call["start"]
    end = size if call["end"] is None else call["end"]
    start, end = (min(size, max(0, each + size * (each < 0))) for each in (start, end))
    if call["step"] != 1 or not total or start % total or end % total or end <= start:
        return None
    rows = placement.rows
    constants = {"start": start // total * rows, "end": end // total * rows}
    return placement._replace(outer=(end - start) // total), constants


def _parted(call: RuleCall, placement: Placement) -> Any:
    dim, total, rows = call["dim"] % len(call.first.shape), placement.total, placement.rows
    if dim != placement.dim:
        return placement, {}
    size = call.values.get("split_size", call.values.get("split_sizes"))
    count = call.first.shape[dim]
    if isinstance(size, int):
        size = [min(size, count - at) for at in range(0, count, max(1, size))]
    if not total or any(each % total for each in size):
        return None
    results, own = [placement._replace(outer=each // total) for each in size], [each // total * rows for each in size]
    return results, {}, lambda local, *_: torch.split_with_sizes(local, own, dim)


for _names, _decide in {
    "view _unsafe_view": _viewed,
    "transpose t permute unsqueeze select unbind diagonal unfold _conj view_as_complex": _asked,
    "expand": _expanded,
    "squeeze": _squeezed,
    "slice": _sliced,
    "split split_with_sizes unsafe_split unsafe_split_with_sizes": _parted,
    "view_as_real": lambda call, placement: (placement, {}, REAL[call.operator]),
}.items():
    TABLE.update(dict.fromkeys(_names.split(), functools.partial(_view, _decide)))
