"""The table of rules: what an operator of torch makes of rows. Whatever is not here is gathered (tensor.gathered)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.rows.context import current
from grappe.rows.tensor import PARTIAL, Cell, Placement, Rows, full, gathered, own, summed, wrap, written

aten = torch.ops.aten
TABLE: dict[str, Callable[..., Any]] = {}


def of(function: Any) -> Callable[..., Any]:
    """The rule of an operator, which gathers where it returns NotImplemented."""
    name = str(function).removeprefix("aten.")
    made_rule = TABLE.get(name) or TABLE.get(name.partition(".")[0])
    if made_rule is None and torch.Tag.pointwise in function.tags and not name.endswith(("out", "grad_input")):
        made_rule = in_place if function._schema.is_mutable else pointwise
    if made_rule is None:
        return gathered

    def run(function: Any, arguments: Any, options: Any) -> Any:
        try:
            result = made_rule(function, arguments, options)
        except IndexError:  # a rule was called with arguments that it does not know
            result = NotImplemented
        return gathered(function, arguments, options) if result is NotImplemented else result

    return run


def rule(names: str) -> Callable[..., Any]:
    def add(function: Any) -> Any:
        TABLE.update(dict.fromkeys(names.split(), function))
        return function

    return add


# ---- Elementwise -------------------------------------------------------------------------------------------
def part(value: Any, place: Placement, from_end: int) -> Any:
    """The part of what is broadcast with rows that lie in the dimension `from_end`."""
    if not isinstance(value, Tensor):
        return value
    if type(value) is Rows:
        cell = value._cell
        if type(cell.place) is Placement and cell.place.dim - value.dim() == from_end and cell.place[1:] == place[1:]:
            return cell.local
        value = full(value)
    if value.dim() >= -from_end and value.shape[from_end] != 1:
        return own(value, place._replace(dim=value.dim() + from_end))
    return value


def leader(values: Any) -> Any:
    """The value whose rows lead: of most dimensions; None if no process has only rows."""
    lead = None
    for each in values:
        if type(each) is Rows and type(each._cell.place) is Placement and (lead is None or each.dim() > lead.dim()):
            lead = each
    return lead


LINEAR = set(
    ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "mul.Scalar", "div.Scalar", "add.Scalar", "sub.Scalar", "clone.default", "add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor"]
)


def _linear(function: Any, arguments: Any, options: Any) -> Any:
    """Terms of a sum through a linear function; NotImplemented where it is not linear in them."""
    name = str(function).removeprefix("aten.")
    first, other = arguments[0], arguments[1] if len(arguments) > 1 else None
    terms = [type(each) is Rows and each._cell.place is PARTIAL for each in (first, other)]
    of_rows = [type(each) is Rows and each._cell.place is not None for each in (first, other)]
    kind = name[:3]
    if kind in ("mul", "div") and terms[0] and not of_rows[1]:
        if not first.dtype.is_floating_point and kind == "div":
            return NotImplemented
        return function(first._cell.local, full(other), **options)
    if kind == "mul" and terms[1] and not of_rows[0] and name == "mul.Tensor":
        return function(full(first), other._cell.local, **options)
    if kind in ("add", "sub") and (terms[0] or not name.partition(".")[0].endswith("_")):
        parts_of = []
        for each, is_terms, rows in zip((first, other), terms, of_rows, strict=True):
            if rows and not is_terms:
                return NotImplemented
            plain = each._cell.local if is_terms else full(each)
            if not is_terms and current().rank:
                plain = torch.zeros_like(plain) if isinstance(plain, Tensor) else type(plain)(0)
            parts_of.append(plain)
        return function(*parts_of, **options)
    if kind in ("neg", "clo"):
        return function(first._cell.local, **options)
    return NotImplemented


POINTWISE = set(
    ["leaky_relu_backward", "elu_backward", "softplus_backward", "hardtanh_backward", "log_sigmoid_backward", "hardswish_backward", "hardsigmoid_backward", "mish_backward", "softshrink_backward", "hardshrink_backward", "_prelu_kernel", "rrelu_with_noise_backward"]
)


def _has_terms(values: Any) -> bool:
    return any(type(each) is Rows and each._cell.place is PARTIAL for each in values)


def pointwise(function: Any, arguments: Any, options: Any) -> Any:
    lead = leader(arguments)
    if lead is None:
        if str(function).removeprefix("aten.") in LINEAR and _has_terms(arguments):
            made = _linear(function, arguments, options)
            if made is not NotImplemented:
                return wrap(made, PARTIAL)
        return function(*[full(each) for each in arguments], **options)
    if any(isinstance(each, Tensor) for each in options.values()) or any(type(each) is list for each in arguments):
        return NotImplemented
    place = lead._cell.place
    from_end = place.dim - lead.dim()
    made = function(*[part(each, place, from_end) for each in arguments], **options)
    dim = made.dim() + from_end
    return wrap(made, place if dim == place.dim else place._replace(dim=dim))


TABLE.update(dict.fromkeys(POINTWISE, pointwise))


@rule("fill_ zero_ masked_fill_ copy_")
def in_place(function: Any, arguments: Any, options: Any) -> Any:
    """Writes to rows from rows; to what every process has, from wholes."""
    first = arguments[0]
    if type(first) is not Rows:
        function(first, *[full(each) for each in arguments[1:]], **options)
        return first
    cell = first._cell
    if cell.ghost is not None:
        return NotImplemented
    if type(cell.place) is Placement:
        place, from_end = cell.place, cell.place.dim - first.dim()
        function(cell.local, *[part(each, place, from_end) for each in arguments[1:]], **options)
        return written(first)
    if cell.place is PARTIAL:
        name = str(function).removeprefix("aten.")
        if name == "zero_.default":
            function(cell.local)
            return written(first)
        if name in LINEAR and _linear(function, arguments, options) is not NotImplemented:
            return written(first)
        full(first)
    function(first._cell.local, *[full(each) for each in arguments[1:]], **options)
    return written(first)


@rule("_to_copy")
def _to_copy(function: Any, arguments: Any, options: Any) -> Any:
    (value,) = arguments
    cell = value._cell
    if cell.place is PARTIAL and options.get("dtype", value.dtype) != value.dtype:
        full(value)
    made = wrap(
        function(cell.local, **options) if cell.place is not None else function(full(value), **options), cell.place
    )
    return _with_whole(made, cell, lambda plain: function(plain, **options))


def _with_whole(made: Any, cell: Cell, function: Any) -> Any:
    """What is without_messages whole stays so, computed when it is asked for."""
    if (
        type(made) is Rows
        and cell.whole is not None
        and cell.seen == cell.family.version
        and type(cell.place) is Placement
    ):
        before = cell.whole
        made._cell.whole = lambda: function(before if isinstance(before, Tensor) else before())
    return made


@rule("detach alias lift_fresh")
def _same(function: Any, arguments: Any, options: Any) -> Any:
    return Rows(arguments[0]._cell, arguments[0].shape, arguments[0].stride())


@rule("zeros_like ones_like full_like empty_like")
def _like(function: Any, arguments: Any, options: Any) -> Any:
    place = arguments[0]._cell.place
    return wrap(
        function(arguments[0]._cell.local, *arguments[1:], **options), place if type(place) is Placement else None
    )


@rule("new_zeros new_ones new_empty new_full new_empty_strided")
def _new(function: Any, arguments: Any, options: Any) -> Any:
    return function(arguments[0]._cell.local, *arguments[1:], **options)


@rule("_local_scalar_dense equal is_same_size _fused_sdp_choice")
def _read(function: Any, arguments: Any, options: Any) -> Any:
    if function is aten._fused_sdp_choice.default:
        return function(*[each._cell.local if type(each) is Rows else each for each in arguments], **options)
    return function(*[full(each) for each in arguments], **options)


# ---- Views -------------------------------------------------------------------------------------------------
def _view_of(value: Rows, local: Tensor, place: Any) -> Rows:
    made = Cell(local, place, value._cell.family)
    if place is PARTIAL:
        made.family.terms += [weakref.ref(value._cell), weakref.ref(made)]
    return Rows(made)


def viewing(places: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of a view, parts_of what it makes of a place and of the arguments for the local part."""

    def run(function: Any, arguments: Any, options: Any) -> Any:
        value, cell = arguments[0], arguments[0]._cell
        if cell.ghost is not None:
            return NotImplemented
        if type(cell.place) is not Placement:
            made = function(cell.local, *arguments[1:], **options)
            many = isinstance(made, (list, tuple))
            return [_view_of(value, each, cell.place) for each in made] if many else _view_of(value, made, cell.place)
        made_rule = places(value, cell.place, *arguments[1:], **options)
        if made_rule is NotImplemented:
            return made_rule
        place, rest = made_rule
        try:
            made = function(cell.local, *(arguments[1:] if rest is None else rest), **options)
        except RuntimeError:
            return NotImplemented
        if isinstance(made, (list, tuple)):
            return [_view_of(value, each, place) for each in made]
        return _with_whole(_view_of(value, made, place), cell, lambda each: function(each, *arguments[1:], **options))

    return run


def _seen(value: Rows, place: Placement, shape: Any) -> Any:
    """The dimension of a new shape that has the rows: `before` x total x `after` elements, in place and shape."""
    shape = list(shape)
    if -1 in shape:
        shape[shape.index(-1)] = value.numel() // max(1, -math.prod(shape))
    old, total = value.shape, sum(place.sizes)
    before, after = math.prod(old[: place.dim]) * place.outer, math.prod(old[place.dim + 1 :])
    for dim, size in enumerate(shape):
        ahead, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if not ahead or not behind or before % ahead or total * after % behind:
            continue
        outer, rows = before // ahead, total * after // behind
        if size != outer * rows or any(each * after % behind or each * after < 2 * behind for each in place.sizes):
            continue
        sizes = tuple(each * after // behind for each in place.sizes)
        shape[dim] = outer * sizes[current().rank]
        return Placement(dim, sizes, outer), (shape,)
    return NotImplemented


TABLE["view"] = TABLE["_unsafe_view"] = TABLE["_reshape_alias"] = viewing(
    lambda value, place, shape, *_: _seen(value, place, shape)
)


@rule("reshape")
def _reshape(function: Any, arguments: Any, options: Any) -> Any:
    return TABLE["view"](aten.view.default, arguments, options)


def _swapped(value: Rows, place: Placement, a: int, b: int) -> Any:
    a, b = a % value.dim(), b % value.dim()
    return place._replace(dim=b if place.dim == a else a if place.dim == b else place.dim), None


def _expanded(value: Rows, place: Placement, shape: Any, **_: Any) -> Any:
    dim = place.dim + len(shape) - value.dim()
    shape = list(shape)
    shape[dim] = value._cell.local.shape[place.dim]
    return place._replace(dim=dim), (shape,)


def _squeezed(value: Rows, place: Placement, dims: Any = None) -> Any:
    dims = range(value.dim()) if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
    gone = [d for d in {each % value.dim() for each in dims} if value.shape[d] == 1]
    return place._replace(dim=place.dim - sum(d < place.dim for d in gone)), (gone,)


@rule("squeeze")
def _squeeze(function: Any, arguments: Any, options: Any) -> Any:
    if type(arguments[0]._cell.place) is Placement and len(arguments) == 1:
        function = aten.squeeze.dims
    return viewing(_squeezed)(
        function if function is not aten.squeeze.dim else aten.squeeze.dims,
        (arguments[0], *([each] if isinstance(each, int) else each for each in arguments[1:])),
        options,
    )


def _sliced(value: Rows, place: Placement, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim % value.dim() != place.dim:
        return place, None
    size, total = value.shape[place.dim], sum(place.sizes)
    start, end = (0 if start is None else start), (size if end is None else min(end, size))
    start, end = start + size * (start < 0), end + size * (end < 0)
    if step != 1 or start % total or end % total or end <= start:
        return NotImplemented
    n = place.sizes[current().rank]
    return place._replace(outer=(end - start) // total), (dim, start // total * n, end // total * n, 1)


def _selected(value: Rows, place: Placement, dim: int, index: int) -> Any:
    dim %= value.dim()
    return NotImplemented if dim == place.dim else (place._replace(dim=place.dim - (dim < place.dim)), None)


def _parted(value: Rows, place: Placement, size: Any, dim: int = 0) -> Any:
    if dim % value.dim() != place.dim:
        return place, None
    n, total = place.sizes[current().rank], sum(place.sizes)
    if isinstance(size, int) and size % total == 0 and place.outer * total % size == 0:
        return place._replace(outer=size // total), (size // total * n, dim)
    return NotImplemented


TABLE |= {
    "transpose": viewing(_swapped),
    "t": viewing(lambda value, place: _swapped(value, place, 0, 1) if value.dim() == 2 else (place, None)),
    "permute": viewing(lambda v, place, dims: (place._replace(dim=[d % v.dim() for d in dims].index(place.dim)), None)),
    "unsqueeze": viewing(lambda v, p, dim: (p._replace(dim=p.dim + (dim % (v.dim() + 1) <= p.dim)), None)),
    "expand": viewing(_expanded),
    "slice": viewing(_sliced),
    "select": viewing(_selected),
    "split": viewing(_parted),
    "split_with_sizes": viewing(_parted),
    "unbind": viewing(
        lambda v, p, dim=0: (
            NotImplemented if dim % v.dim() == p.dim else (p._replace(dim=p.dim - (dim % v.dim() < p.dim)), None)
        )
    ),
    "unfold": viewing(lambda v, p, dim, *_: NotImplemented if dim % v.dim() == p.dim else (p, None)),
}


@rule("cat")
def _cat(function: Any, arguments: Any, options: Any) -> Any:
    tensors, dim = arguments[0], arguments[1] if len(arguments) > 1 else 0
    lead = leader(tensors)
    if lead is None:
        return function([full(each) for each in tensors], dim)
    place = lead._cell.place
    tensors = [each for each in tensors if each.numel() or each.dim() > 1]
    if dim % lead.dim() != place.dim:
        return wrap(function([part(each, place, place.dim - lead.dim()) for each in tensors], dim), place)
    total = sum(place.sizes)
    if any(each.shape[place.dim] % total for each in tensors):
        return NotImplemented
    outers = [each.shape[place.dim] // total for each in tensors]
    parts = [
        part(each, place._replace(outer=outer), place.dim - lead.dim())
        for each, outer in zip(tensors, outers, strict=True)
    ]
    return wrap(function(parts, dim), place._replace(outer=sum(outers)))


@rule("stack")
def _stack(function: Any, arguments: Any, options: Any) -> Any:
    tensors, dim = arguments[0], arguments[1] if len(arguments) > 1 else 0
    lead = leader(tensors)
    if lead is None:
        return function([full(each) for each in tensors], dim)
    place = lead._cell.place
    made = function([part(each, place, place.dim - lead.dim()) for each in tensors], dim)
    return wrap(made, place._replace(dim=place.dim + (dim % made.dim() <= place.dim)))


# ---- Along dimensions --------------------------------------------------------------------------------------
def _dims(value: Tensor, dims: Any) -> list[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(value.dim()))
    return [each % max(1, value.dim()) for each in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _argument(function: Any, arguments: Any, options: Any, name: str, default: Any) -> Any:
    for index, each in enumerate(function._schema.arguments):
        if each.name == name:
            return arguments[index] if index < len(arguments) else options.get(name, default)
    return default


@rule(
    "sum mean amax amin argmax argmin max min logsumexp prod var std var_mean std_mean any all linalg_vector_norm norm median _log_softmax _softmax _safe_softmax cumsum "
    "cumprod sort topk argsort flip roll glu _softmax_backward_data _log_softmax_backward_data glu_backward gather scatter scatter_add index_select gather_backward "
    "count_nonzero select_backward slice_backward"
)
def _along(function: Any, arguments: Any, options: Any) -> Any:
    """Functions along dimensions: on own rows where these are others; sums of own rows are terms of the whole's."""
    name = function._schema.name.removeprefix("aten::")
    if name in ("select_backward", "slice_backward"):
        return _view_backward(function, arguments, options)
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    lead = leader(tensors)
    if lead is None:
        if name in ("sum",) and _has_terms(arguments):
            return wrap(function(arguments[0]._cell.local, *arguments[1:], **options), PARTIAL)
        return function(*[full(each) for each in arguments], **options)
    place, value = lead._cell.place, arguments[0]
    if name in ("max", "min") and "dim" not in function._overloadname and len(tensors) == 2:
        return NotImplemented
    default: Any = {"cumsum": 0, "topk": -1, "sort": -1, "argsort": -1, "glu": -1}.get(name)
    dims = _argument(function, arguments, options, "dims" if name in ("flip", "roll") else "dim", default)
    along = _dims(lead, dims)
    if name in ("scatter", "gather", "scatter_add") and any(
        each.dim() != lead.dim() or each.shape[place.dim] != lead.shape[place.dim] for each in tensors
    ):
        return NotImplemented
    if name != "index_select" and any(each.dim() != lead.dim() for each in tensors):
        return NotImplemented
    if place.dim not in along:
        keeps = [
            part(e, place, place.dim - lead.dim()) if name != "index_select" or e is lead else full(e)
            for e in arguments
        ]
        if name == "index_select" and value is not lead:
            return NotImplemented
        made = function(*keeps, **options)
        shrinks = (
            not _argument(function, arguments, options, "keepdim", False)
            and function._overloadname != "out"
            and name in _REDUCE
        )
        place = place._replace(dim=place.dim - sum(d < place.dim for d in along)) if shrinks else place
        return tuple(wrap(each, place) for each in made) if isinstance(made, (tuple, list)) else wrap(made, place)
    if name == "index_select" and value is lead:
        return _taken(function, arguments)
    return _reduced(function, name, value, along, arguments, options)


_REDUCE = set(
    ["sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "logsumexp", "prod", "var", "std", "var_mean", "std_mean", "any", "all", "linalg_vector_norm", "norm", "median", "count_nonzero"]
)


def _reduced(function: Any, name: str, value: Rows, along: list[int], arguments: Any, options: Any) -> Any:
    local = value._cell.local
    if name in ("sum", "count_nonzero"):
        return wrap(function(local, *arguments[1:], **options), PARTIAL)
    if name == "mean":
        there = math.prod(local.shape[d] for d in along) / math.prod(value.shape[d] for d in along)
        return wrap(function(local, *arguments[1:], **options) * there, PARTIAL)
    if name in ("amax", "amin", "any", "all") or (name in ("max", "min") and len(arguments) == 1):
        least = name in ("amin", "min", "all")
        return summed(function(local, *arguments[1:], **options), dist.ReduceOp.MIN if least else dist.ReduceOp.MAX).to(
            torch.bool if name in ("any", "all") else value.dtype
        )
    if (
        name == "linalg_vector_norm"
        and _argument(function, arguments, options, "ord", 2) == 2
        and not options.get("dtype")
    ):
        return summed(function(local, *arguments[1:], **options).square_()).sqrt_()
    return NotImplemented


def _taken(function: Any, arguments: Any) -> Any:
    """Rows in another order: each process takes its own of the new order from all."""
    value, dim, index = arguments
    index = full(index)
    place = value._cell.place
    if len(index) != value.shape[place.dim] or place.outer != 1:
        return NotImplemented
    return wrap(function(full(value), dim, own(index, place._replace(dim=0))), place)


@rule("index")
def _index(function: Any, arguments: Any, options: Any) -> Any:
    value, indices = arguments
    if type(value) is not Rows or type(value._cell.place) is not Placement:
        return NotImplemented
    place = value._cell.place
    at = [i for i, each in enumerate(indices) if each is not None]
    if place.dim in at:
        if (
            at == [place.dim]
            and place.dim == 0
            and indices[0].dim() == 1
            and indices[0].dtype is torch.int64
            and len(indices) == 1
        ):
            return _taken(aten.index_select.default, (value, 0, indices[0]))
        return NotImplemented
    index = [full(each) for each in indices]
    if any(each is not None and each.dtype is torch.bool for each in index) or at != list(range(at[0], at[-1] + 1)):
        return NotImplemented
    wide = max(each.dim() for each in index if each is not None)
    made = function(value._cell.local, index)
    return wrap(made, place._replace(dim=place.dim + (wide - len(at)) * (at[0] < place.dim)))


def _view_backward(function: Any, arguments: Any, options: Any) -> Any:
    """Gradients of views: zeros, and the gradient in its place."""
    grad, sizes, dim = arguments[:3]
    if type(grad) is not Rows or type(grad._cell.place) is not Placement:
        return NotImplemented if type(grad) is not Rows else _partial_through(function, grad, arguments)
    place = grad._cell.place
    is_select = function is aten.select_backward.default
    dim %= len(sizes)
    at = place.dim + (is_select and dim <= place.dim)
    if dim == at or sizes[at] != grad.shape[place.dim]:
        return NotImplemented
    sizes = [*sizes]
    sizes[at] = grad._cell.local.shape[place.dim]
    return wrap(function(grad._cell.local, sizes, *arguments[2:]), place._replace(dim=at))


def _partial_through(function: Any, value: Rows, arguments: Any) -> Any:
    place = value._cell.place
    return wrap(function(value._cell.local if place is PARTIAL else full(value), *arguments[1:]), place)


# ---- Products ----------------------------------------------------------------------------------------------
def _at(value: Any) -> Any:
    """Where a factor's rows are; terms are summed first unless they stay terms."""
    return value._cell.place if type(value) is Rows else None


def _product(function: Any, a: Any, b: Any, rows: int) -> Any:
    """a [.., m, k] x b [.., k, n]: `rows` is the dimension m of a; the one before is a batch's in both."""
    at, bt = _at(a), _at(b)
    if (at is PARTIAL and bt is None) or (bt is PARTIAL and at is None):
        return wrap(function(*[x._cell.local if _at(x) is PARTIAL else full(x) for x in (a, b)]), PARTIAL)
    at, bt = (None if each is PARTIAL else each for each in (at, bt))
    if at is None and bt is None:
        return function(full(a), full(b))
    if (at and at.dim == rows - 1) or (bt and bt.dim == rows - 1):  # samples of a batched product
        place = at if at and at.dim == rows - 1 else bt
        return wrap(function(part(a, place, -3), part(b, place, -3)), place)
    if (at and at.dim == rows + 1) or (bt and bt.dim == rows and not (at and at.dim == rows)):  # contracted
        place = at if at and at.dim == rows + 1 else bt
        return wrap(function(part(a, place, -1), part(b, place, -2)), PARTIAL)
    if at and at.dim == rows:
        return wrap(function(a._cell.local, full(b)), at)
    return wrap(function(full(a), b._cell.local), bt)


@rule("mm")
def _mm(function: Any, arguments: Any, options: Any) -> Any:
    return _product(function, *arguments, 0)


@rule("bmm")
def _bmm(function: Any, arguments: Any, options: Any) -> Any:
    return _product(function, *arguments, 1)


@rule("addmm baddbmm")
def _addmm(function: Any, arguments: Any, options: Any) -> Any:
    bias, a, b = arguments
    plain = aten.mm.default if function is aten.addmm.default else aten.bmm.default
    at = _at(a)
    if (
        function is aten.addmm.default
        and type(at) is Placement
        and at.dim == 0
        and not isinstance(b, Rows)
        and not isinstance(bias, Rows)
        and bias.dim() == 1
    ):
        return wrap(function(bias, a._cell.local, b, **options), at)
    made = plain(a, b) if isinstance(a, Rows) or isinstance(b, Rows) else plain(a, b)
    return made * options.get("alpha", 1) + bias * options.get("beta", 1) if options else made + bias


# ---- Samples: convolutions, pooling and others of a batch-first sample each --------------------------------
@rule("convolution")
def _convolution(function: Any, arguments: Any, options: Any) -> Any:
    value, weight, bias = arguments[:3]
    if _at(weight) is not None or type(_at(value)) is not Placement or value._cell.place.dim:
        return NotImplemented
    return wrap(function(value._cell.local, full(weight), full(bias), *arguments[3:]), value._cell.place)


@rule("convolution_backward")
def _convolution_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, value, weight = arguments[:3]
    lead = leader((grad, value))
    if lead is None or lead._cell.place.dim or _at(weight) is not None:
        return NotImplemented
    place = lead._cell.place
    made = function(part(grad, place, -grad.dim()), part(value, place, -value.dim()), full(weight), *arguments[3:])
    return tuple(
        None if each is None else wrap(each, to) for each, to in zip(made, (place, PARTIAL, PARTIAL), strict=True)
    )


@rule(
    "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d "
    "upsample_bilinear2d reflection_pad2d reflection_pad2d_backward replication_pad2d pixel_shuffle pixel_unshuffle max_pool3d_with_indices constant_pad_nd im2col col2im "
    "grid_sampler_2d adaptive_max_pool2d avg_pool3d channel_shuffle adaptive_max_pool2d_backward"
)
def _samples(function: Any, arguments: Any, options: Any) -> Any:
    lead = leader(arguments)
    name = function._schema.name
    if lead is None or lead._cell.place.dim or lead.dim() < (2 if "pad_nd" in name else 4 if "2d" in name else 3):
        return NotImplemented
    if "pad_nd" in name and len(arguments[1]) >= 2 * lead.dim():
        return NotImplemented
    place = lead._cell.place
    made = function(
        *[part(each, place, -each.dim()) if isinstance(each, Tensor) else each for each in arguments], **options
    )
    return tuple(wrap(each, place) for each in made) if isinstance(made, tuple) else wrap(made, place)


@rule("upsample_nearest2d_backward upsample_bilinear2d_backward")
def _upsample_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, place = arguments[0], _at(arguments[0])
    if type(place) is not Placement or place.dim:
        return NotImplemented
    size = [*arguments[2]]
    size[0] = grad._cell.local.shape[0]
    return wrap(function(grad._cell.local, arguments[1], size, *arguments[3:]), place)


@rule("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward")
def _attention(function: Any, arguments: Any, options: Any) -> Any:
    lead = leader(arguments)
    mask = options.get("attn_mask")
    if lead is None or lead._cell.place.dim or (mask is not None and (type(mask) is Rows or mask.dim() > 2)):
        return NotImplemented
    place = lead._cell.place
    drops = arguments[3] if "backward" not in function._schema.name and len(arguments) > 3 else 0
    if drops:
        return NotImplemented
    made = function(
        *[part(each, place, -each.dim()) if isinstance(each, Tensor) else each for each in arguments], **options
    )
    return tuple(wrap(each, place) for each in made)


@rule("embedding")
def _embedding(function: Any, arguments: Any, options: Any) -> Any:
    weight, index = arguments[:2]
    if _at(weight) is not None or type(_at(index)) is not Placement:
        return NotImplemented
    return wrap(function(full(weight), index._cell.local, *arguments[2:], **options), index._cell.place)


@rule("embedding_dense_backward")
def _embedding_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, index = arguments[:2]
    lead = leader((grad, index))
    if lead is None:
        return _partial_through(function, grad, (grad, full(index), *arguments[2:]))
    place = lead._cell.place
    at = index.dim()
    return wrap(
        function(
            part(grad, place, place.dim - grad.dim() if lead is grad else place.dim - at - 1),
            part(index, place, place.dim - at),
            *arguments[2:],
        ),
        PARTIAL,
    )
