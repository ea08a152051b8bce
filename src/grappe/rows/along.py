"""Rules along the dimension of the rows of views, joins, softmax and products: rows are taken from where they are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grappe.private_api.torch import no_modes
from grappe.rows.context import NOW
from grappe.rows.exchange import RowExchange, every_row, in_proportion, intervals, noted, resized, scattered, sizes_of
from grappe.rows.layout import Placement, TensorLayout, even
from grappe.rows.messages import summed
from grappe.rows.plans import RuleCall, Way, along, along_by
from grappe.rows.rules import aten

CHOSEN, MOVED = "chosen rows", "moved rows"


def _own_dimension(layout: Any, dim: int) -> Placement | None:
    """Returns the placement of rows in this dimension, by themselves; None: they are elsewhere."""
    at = layout.placement if type(layout) is TensorLayout else None
    if type(at) is not Placement or at.outer > 1 or dim % max(1, len(layout.shape)) != at.dim:
        return None
    return at


def _along_dim(call: RuleCall) -> Placement | None:
    """Returns the placement of the first argument's rows, if the call is along their dimension."""
    return _own_dimension(call.first, call["dim"])


# ---- Views -------------------------------------------------------------------------------------------------


def _rows(at: Placement, first: int, end: int) -> tuple[RowExchange, Placement | None]:
    """Returns how rows `first` to `end` come, and their placement: every process has what is shorter than parts."""
    if end - first < len(at.sizes):
        return RowExchange.to_all(at.dim, at.sizes, first, end, CHOSEN), None
    sizes = in_proportion(at.sizes, end - first)
    want = tuple((first + a, first + b) for a, b in intervals(sizes))
    return RowExchange(dim=at.dim, sizes=at.sizes, want=want, purpose=CHOSEN), at._replace(sizes=sizes)


@along_by("slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind", _along_dim)
def _shown(call: RuleCall, at: Placement) -> Way | None:
    """Views of some rows, which torch shows by their numbers, are copies of what lies on several processes."""
    with no_modes():
        shown = call.operator(torch.arange(at.total), **{name: call[name] for name in call.names[1:]} | {"dim": 0})
    many, several, end = isinstance(shown, (tuple, list)), [], 0
    for part in shown if many else [shown]:
        numbers = part.reshape(-1).tolist()
        first, end = (numbers[0], numbers[-1] + 1) if numbers else (end, end)
        if call.name == "slice" and (call["step"] != 1 or not 0 < len(numbers) < at.total):
            return None
        several.append((*_rows(at, first, end), part.dim()))

    def pieces(local: Tensor, *_: Any, **__: Any) -> Any:
        made = [rows.brought(local).clone() for rows, _, _ in several]
        made = [each if dims else each.squeeze(at.dim) for each, (_, _, dims) in zip(made, several, strict=True)]
        return made if many else made[0]

    places = [place for _, place, _ in several]
    return Way(operator=pieces, results=places if many else places[0], copied=True)


@along("slice_backward")
def _slice_backward(call: RuleCall) -> Way | None:
    gradient, every = call["grad_output"], [*call["input_sizes"]]
    source = _own_dimension(gradient, call["dim"])
    if source is None or call["step"] != 1 or every[source.dim] == source.total:
        return None
    sizes, first = sizes_of(every[source.dim]), call["start"] % every[source.dim]
    if sizes is None:
        return None
    at = source._replace(sizes=sizes)
    want = tuple((first + a, first + b) for a, b in intervals(source.sizes))
    rows = RowExchange(dim=at.dim, sizes=at.sizes, want=want, purpose=CHOSEN)

    def back(arriving: Tensor, *_: Any) -> Tensor:
        return rows.give_back(arriving.clone(), resized(every, at.dim, at.rows))

    return Way(operator=back, results=at)


@along("view _unsafe_view")
def _viewed(call: RuleCall) -> Way | None:
    """Patches of several rows: whole ones on each process."""
    value, at = call.first, call.first.placement
    if type(at) is not Placement or "size" not in call.values or not call.results.numel():
        return None
    before, after, shape = math.prod(value.shape[: at.dim]), math.prod(value.shape[at.dim + 1 :]), call.results.shape
    for dim in range(len(shape)):
        ahead, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if at.outer > 1 or ahead != before or behind % after or at.total * after % behind or behind == after:
            continue
        patch = behind // after
        if not any(each % patch for each in at.sizes) or at.total // patch < len(at.sizes):
            return None
        lengths = in_proportion(at.sizes, at.total // patch)
        taken = at._replace(sizes=tuple(patch * each for each in lengths))
        made = Placement(dim, lengths)
        constants = {"size": resized(shape, dim, made.rows)}
        return Way(at={call.names[0]: taken}, constants=constants, operator=Tensor.reshape, results=made, copied=True)
    return None


# ---- Together ----------------------------------------------------------------------------------------------


@along("cat")
def _joined(call: RuleCall) -> Way | None:
    layouts = call["tensors"]
    if call.lead is None or call["dim"] % len(call.lead.shape) != call.placement.dim:
        return None
    dim = call.placement.dim
    if any(len(each.shape) != len(call.lead.shape) and each.shape != (0,) for each in layouts):
        return None
    places = [each.placement if type(each.placement) is Placement else None for each in layouts]
    if any(each is not None and (each.dim, each.outer) != (dim, 1) for each in places):
        return None
    lengths = [0 if each.shape == (0,) else each.shape[dim] for each in layouts]
    sizes = noted(even(sum(lengths)))
    wants = [
        tuple((min(max(a, start), end) - start, min(max(b, start), end) - start) for a, b in intervals(sizes))
        for start, end in intervals(lengths)
    ]

    def joined(tensors: Any, *_: Any) -> Tensor:
        parts = []
        for each, place, want, length in zip(tensors, places, wants, lengths, strict=True):
            if not length:
                continue
            if place is not None:
                parts.append(RowExchange(dim=dim, sizes=place.sizes, want=want, purpose=MOVED).brought(each))
            else:
                a, b = want[NOW.context.rank]
                parts.append(each.narrow(dim, a, b - a))
        return torch.cat(parts, dim)

    return Way(at={"tensors": places}, operator=joined, results=call.placement._replace(sizes=sizes))


@along("roll")
def _rolled(call: RuleCall) -> Any:
    dims = [dim % len(call.first.shape) for dim in call["dims"]]
    at = call.first.placement
    if type(at) is not Placement or at.outer > 1 or at.dim not in dims:
        return None
    shift = sum(each for each, dim in zip(call["shifts"], dims, strict=True) if dim == at.dim) % at.total
    others = [(each, dim) for each, dim in zip(call["shifts"], dims, strict=True) if dim != at.dim]

    def rolled(operator: Any, arguments: Any, options: Any) -> Any:
        value = arguments[0]
        if shift:
            behind, ahead = (
                aten.slice(value, at.dim, *each) for each in ((at.total - shift, at.total), (0, at.total - shift))
            )
            value = aten.cat([behind, ahead], at.dim)
        return operator(value, *map(list, zip(*others, strict=True))) if others else value.clone()

    return rolled


# ---- Softmax -----------------------------------------------------------------------------------------------


@along_by("_softmax _log_softmax", _along_dim)
def _softmax(call: RuleCall, at: Placement) -> Way:
    dim, dtype = call["dim"], call.results.dtype

    def softmax(local: Tensor, *_: Any, **__: Any) -> Tensor:
        part = local.to(dtype)
        part = part - summed(part.amax(dim, keepdim=True), "max")
        powers = part.exp()
        total = summed(powers.sum(dim, keepdim=True))
        return part.sub_(total.log_()) if "log" in call.name else powers.div_(total)

    return Way(operator=softmax, results=at)


@along("_softmax_backward_data _log_softmax_backward_data")
def _softmax_backward(call: RuleCall) -> Way | None:
    at, dim = _own_dimension(call["output"], call["dim"]), call["dim"]
    if at is None:
        at = call["output"].placement
        return Way(at={"grad_output": at, "output": at}, results=at) if type(at) is Placement else None
    dtype = call.results.dtype

    def back(gradient: Tensor, output: Tensor, *_: Any) -> Tensor:
        if "log" in call.name:
            return (gradient - output.exp() * summed(gradient.sum(dim, keepdim=True))).to(dtype)
        weighted = gradient * output
        return (weighted - output * summed(weighted.sum(dim, keepdim=True))).to(dtype)

    return Way(at={"grad_output": at, "output": at}, operator=back, results=at)


# ---- Products ----------------------------------------------------------------------------------------------


@along("mm bmm")
def _product(call: RuleCall) -> Way | None:
    """Products of own rows and all columns; those that sum over the rows keep a part of what they give."""
    a, b = (call[name].placement for name in ("self", "mat2"))
    a, b = (each if type(each) is Placement and each.outer == 1 else None for each in (a, b))
    rows, columns = len(call.first.shape) - 2, len(call.first.shape) - 1
    if a is not None and a.dim == rows and b is not None and b.dim >= rows:

        def with_all(own: Tensor, other: Tensor, *_: Any) -> Tensor:
            return torch.matmul(own, every_row(other, b, "attention"))

        return Way(at={"self": a, "mat2": b}, operator=with_all, results=a)
    summed_over = a if a is not None and a.dim == columns else None
    if a is None and b is not None and b.dim == rows:
        summed_over = b._replace(dim=columns)
    if summed_over is None or call.name == "mm" or summed_over.total not in call.results.shape[1:]:
        return None
    at = summed_over._replace(dim=1 + (call.results.shape[1] != summed_over.total))
    places = {"self": summed_over, "mat2": summed_over._replace(dim=rows)}
    return Way(at=places, results=at, after=lambda made: scattered(made, at, "attention"))
