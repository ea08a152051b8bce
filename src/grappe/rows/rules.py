"""Rules of operators that work row by row, sum over rows, multiply, index or put tensors together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import operator_schema
from grappe.rows.context import NOW
from grappe.rows.exchange import HALF
from grappe.rows.layout import GHOST, PARTIAL, Placement, TensorLayout, is_dense, layout_of
from grappe.rows.messages import own_part, summed
from grappe.rows.plans import AS_IS, FIRST, Rule, RuleCall, Unalike, Way, procedure, rule
from grappe.rows.tensor import Rows, full, own_local, own_memory, own_of, rows_of, wrapped, written

aten = torch.ops.aten
INFINITY = float("inf")

# ---- Elementwise -------------------------------------------------------------------------------------------


@rule(
    "leaky_relu_backward elu_backward softplus_backward hardtanh_backward log_sigmoid_backward hardswish_backward "
    "hardsigmoid_backward mish_backward softshrink_backward hardshrink_backward _prelu_kernel _prelu_kernel_backward "
    "gelu_backward silu_backward threshold_backward sigmoid_backward tanh_backward logit_backward"
)
def pointwise(call: RuleCall) -> Way | None:
    """Each number from the numbers at its place."""
    if call.lead is None:
        terms = _linear(call)
        return Way(at=terms, results=PARTIAL) if terms is not None else all_of(call)
    if any(type(each) is list for each in call.values.values()):
        return None
    most = max(len(each.shape) for each in call.layouts)
    placement = call.placement
    return Way(results=placement._replace(dim=placement.dim - len(call.lead.shape) + most))


def all_of(call: RuleCall) -> Way:
    """Every process computes from all rows, or from sums."""
    return Way(at=everywhere(call, None))


def everywhere(call: RuleCall, placement: Any) -> dict[str, Any]:
    """Returns one placement for all tensors of a call, by argument."""
    return {name: placement for name, value in call.values.items() if type(value) is TensorLayout}


def rule_of_rows(names: str, *, first: bool = False) -> Callable[[Rule], Rule]:
    """Makes a decorator as `rule`, for calls with rows; of others every process computes from all.

    Args:
        first: whether the rows must be in the first dimension; else the call is gathered.
    """

    def of_rows(decide: Rule, call: RuleCall) -> Any:
        if call.lead is None:
            return all_of(call)
        return None if first and call.placement.dim else decide(call)

    return lambda decide: rule(names)(functools.partial(of_rows, decide))


_LINEAR = {
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.", "mul.Scalar", "div.Scalar", "clone.", "add_.Tensor",
    "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "mul_.Scalar", "div_.Scalar", "neg_.",
}  # fmt: skip


def _linear(call: RuleCall) -> dict[str, Any] | None:
    """Returns where terms of a sum are taken by a function that is linear in them; None if it is not."""
    if f"{call.name}.{call.overload}" not in _LINEAR:
        return None
    values = [call.values[name] for name in call.names[:2]]
    terms = [type(each) is TensorLayout and each.placement is PARTIAL for each in values]
    if not any(terms) or (call.name.endswith("_") and not terms[0]):
        return None
    kind = call.name.removesuffix("_")
    if kind in ("add", "sub"):  # a number would be added by every process
        return dict.fromkeys(call.names[:2], PARTIAL) if all(type(each) is TensorLayout for each in values) else None
    if sum(terms) > 1 or (kind == "div" and not (terms[0] and values[0].dtype.is_floating_point)):
        return None
    return {name: PARTIAL if is_term else None for name, is_term in zip(call.names, terms, strict=False)}


@rule("fill_ zero_ masked_fill_ copy_")
def in_place(call: RuleCall) -> Way | None:
    """Rows are written from rows; what every process has, from all rows."""
    target, name = call.first, call.names[0]
    others, placement = everywhere(call, None), target.placement
    if placement is GHOST or any(type(each) is list for each in call.values.values()):
        return None
    if type(placement) is Placement:
        taken = {key: call.aligned(call[key], target) for key in others if key != name}
        return Way(at=taken | {name: placement}, results=FIRST)
    if placement is PARTIAL:
        if call.name == "zero_":
            return Way(at={name: PARTIAL}, results=FIRST)
        if (terms := _linear(call)) is not None:
            return Way(at=terms, results=FIRST)
    return Way(at=others, results=FIRST)


@rule("_to_copy clone")
def _copied(call: RuleCall) -> Way:
    placement = call.first.placement
    dtype: Any = call["dtype"] if call.name == "_to_copy" else None
    if placement is PARTIAL and dtype not in (None, call.first.dtype):
        widens = call.first.dtype in HALF and dtype.is_floating_point and dtype.itemsize > call.first.dtype.itemsize
        placement = PARTIAL if widens else None  # rounded as the sum is, and not each term
    if placement is GHOST:
        placement = None
    return Way(at={call.names[0]: placement}, results=placement, same=type(placement) is Placement)


@procedure("detach alias")
def _same(operator: Any, arguments: Any, options: Any) -> Any:
    return rows_of(arguments[0]._cell)


@procedure("as_strided")
def _as_strided(operator: Any, arguments: Any, options: Any) -> Any:
    """By places in memory: those of all rows, where the tensor has all of its memory."""
    cell = arguments[0]._cell
    family, layout = cell.family, cell.layout
    if not is_dense(layout) or (family is not None and family.numbers != layout.shape.numel()):
        raise GrappeError(f"as_strided of a view of rows ({NOW.context.line()}): take a clone of it first")
    return NotImplemented


@rule("zeros_like ones_like full_like empty_like")
def _like(call: RuleCall) -> Way:
    placement = call.first.placement
    return Way(at={call.names[0]: AS_IS}, results=placement if type(placement) is Placement else None)


@rule("new_zeros new_ones new_empty new_full new_empty_strided")
def _new(call: RuleCall) -> Way:
    """New tensors of as many rows are rows, too."""
    first, size = call.first, call["size"]
    placement = first.placement
    dim = placement.dim if type(placement) is Placement else len(size)
    if dim >= len(size) or size[dim] != first.shape[dim]:
        return Way(at={call.names[0]: AS_IS})
    stride = call["stride"] if call.name == "new_empty_strided" else _contiguous_stride(size)
    layout = TensorLayout(torch.Size(size), tuple(stride), first.dtype, first.device, placement, False)
    constants = {"size": [*layout.local_shape]}
    if call.name == "new_empty_strided":
        constants["stride"] = [*layout.local_stride]
    return Way(at={call.names[0]: AS_IS}, constants=constants, results=placement)


@procedure("_local_scalar_dense equal is_same_size")
def _read(operator: Any, arguments: Any, options: Any) -> Any:
    return operator(*map(full, arguments), **options)


@procedure("record_stream is_pinned")
def _of_own(operator: Any, arguments: Any, options: Any) -> Any:
    return operator(own_local(arguments[0]), *arguments[1:], **options)


# ---- Along dimensions --------------------------------------------------------------------------------------

_REDUCES = (
    "sum mean amax amin argmax argmin max min logsumexp prod var std var_mean std_mean any all linalg_vector_norm norm "
    "median nanmedian count_nonzero nansum aminmax mode kthvalue"
)
_ALONG = (
    "_log_softmax _softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort topk argsort flip roll glu "
    "_softmax_backward_data _log_softmax_backward_data glu_backward gather scatter scatter_add scatter_reduce "
    "_fft_c2c _fft_r2c _fft_c2r tril triu"
)


def _dims(call: RuleCall, layout: TensorLayout) -> list[int]:
    count = len(layout.shape)
    key = next((key for key in ("dim", "dims") if key in call.values), None)
    dims = None if key is None else call.values[key]
    if dims is None or dims == []:
        return list(range(count))
    return [each % max(1, count) for each in (dims if isinstance(dims, list) else [dims])]


@rule(f"{_REDUCES} {_ALONG}")
def _along(call: RuleCall) -> Way | None:
    """Functions along dimensions: on own rows where these are others; sums of own rows are terms of a sum."""
    value, placement = call.first, None if call.lead is None else call.placement
    if placement is None:
        if call.name == "sum" and value.placement is PARTIAL and call["dtype"] in (None, value.dtype):
            return Way(at={call.names[0]: PARTIAL}, results=PARTIAL)
        return all_of(call)
    if call.name in ("max", "min") and call.overload == "other":
        return pointwise(call)
    last = [len(value.shape) - 2, len(value.shape) - 1]
    dims = last if call.name in ("tril", "triu") else _dims(call, call.lead)  # type: ignore[arg-type]
    if call.name == "gather" and placement.dim in dims and value.placement in (None, PARTIAL):  # rows of a table
        return Way(at={"self": None, "index": placement}, results=placement)
    if call.name == "scatter_add" and placement.dim in dims and value.placement in (None, PARTIAL):
        rows = [call[name].shape[placement.dim] for name in ("index", "src")]
        if rows[0] == rows[1]:
            return Way(at={"self": PARTIAL, "index": placement, "src": placement}, results=PARTIAL)
    # Smaller ones of scatter and gather leave rows out.
    if any(
        len(each.shape) != len(call.lead.shape) or each.shape[placement.dim] != call.lead.shape[placement.dim]  # type: ignore[attr-defined]
        for each in call.layouts
    ):
        return None
    if placement.dim in dims:
        return _reduced(call, dims) if value is call.lead or value.placement == placement else None
    shrinks = call.name in _REDUCES.split() and not call.values.get("keepdim", False)
    fewer = sum(each < placement.dim for each in dims) if shrinks else 0
    return Way(results=placement._replace(dim=placement.dim - fewer))


def _reduced(call: RuleCall, dims: list[int]) -> Any:
    """Own rows are reduced, and then the processes' results."""
    value, name = call.first, call.name
    there = math.prod(value.local_shape[dim] for dim in dims)
    total = math.prod(value.shape[dim] for dim in dims)
    if not total or len(call.layouts) != 1:
        return None
    power = None if call.values.get("dtype") else call.values.get("ord", call.values.get("p"))
    if name in ("sum", "count_nonzero", "nansum") or power == 1:
        return Way(results=PARTIAL)
    if name == "mean":
        return Way(results=PARTIAL, after=lambda made: made * (there / total))
    if name in ("amax", "amin", "any", "all") or (name in ("max", "min") and call.overload == ""):
        least = name in ("amin", "min", "all")
        return Way(
            after=lambda made: summed(made, "min" if least else "max"), identity=INFINITY if least else -INFINITY
        )
    if name in ("var", "std", "var_mean", "std_mean") and not value.dtype.is_complex:
        return _spread(call, dims, there, total)
    if name == "linalg_vector_norm" and power == 2 and not value.dtype.is_complex:

        def norm(made: Tensor) -> Tensor:
            wide = torch.float64 if made.device.type != "mps" else torch.float32
            return summed(made.to(wide).square_()).sqrt_().to(made.dtype)

        return Way(after=norm)
    return None


def _spread(call: RuleCall, dims: list[int], there: int, total: int) -> Way:
    """Variances, from each process's count, mean and squares around it."""
    correction, keepdim = call.values.get("correction"), call.values.get("keepdim", False)
    correction = (call.values.get("unbiased", True) if correction is None else correction) * 1

    def own(local: Tensor, *_: Any, **__: Any) -> Any:
        return torch.var_mean(local, dims, correction=0, keepdim=keepdim)

    def of_all(made: Any) -> Any:
        own_var, own_mean = made if isinstance(made, tuple) else (made, made)  # a process without rows has zeros
        mean = summed(own_mean * (there / total))
        spread = summed((own_var + (own_mean - mean).square()) * (there / total)) * total
        spread /= max(0, total - correction)
        spread = spread.sqrt() if call.name.startswith("std") else spread
        return (spread, mean) if call.name.endswith("_mean") else spread

    return Way(results=(None, None) if call.name.endswith("_mean") else None, operator=own, after=of_all)


@rule_of_rows("index_add")
def _index_add(call: RuleCall) -> Way | None:
    """Rows that are added into a table are terms of it; or each row has its own table."""
    table, index, source = call["self"], call["index"], call["source"]
    placement, dim = source.placement, call["dim"] % max(1, len(table.shape))
    if type(index.placement) is Placement and type(placement) is not Placement and source.shape:
        placement = index.placement._replace(dim=dim)
    if type(placement) is not Placement or len(index.shape) != 1 or len(source.shape) != len(table.shape):
        return None
    if placement.dim != dim and source.shape[placement.dim] == table.shape[placement.dim]:
        return Way(at={"self": placement, "index": None, "source": placement}, results=placement)
    if placement.dim != dim or type(table.placement) is Placement or table.placement is GHOST:
        return None
    return Way(at={"self": PARTIAL, "index": placement._replace(dim=0), "source": placement}, results=PARTIAL)


@rule("index_select")
def _index_select(call: RuleCall) -> Any:
    value, index = call["self"], call["index"]
    placement = value.placement
    if type(index.placement) is Placement and value.placement is None and value.shape:
        results = index.placement._replace(dim=call["dim"] % len(value.shape))
        return Way(at={"self": None, "index": index.placement}, results=results)
    if type(placement) is not Placement or not value.shape:
        return None
    if call["dim"] % len(value.shape) != placement.dim:
        return Way(at={"self": placement, "index": None}, results=placement)
    if len(index.shape) != 1 or index.shape[0] != placement.total or placement.outer != 1:
        return None
    return _taken


def _taken(operator: Any, arguments: Any, options: Any) -> Any:
    """Rows in another order: each process takes its own of the new order from all."""
    value, dim, index = arguments
    layout = value._cell.layout
    placement = layout.placement
    made = aten.index_select.default(full(value), dim, own_part(full(index), placement._replace(dim=0)))
    return wrapped(made, contiguous(layout.shape, layout, placement))


def _contiguous_stride(shape: Any) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def contiguous(shape: Any, like: Any, placement: Any) -> TensorLayout:
    """Returns the layout of contiguous rows with the type and device of a tensor, or of a layout."""
    return layout_of(torch.Size(shape), _contiguous_stride(shape), like.dtype, like.device, placement)


@rule("index")
def _index(call: RuleCall) -> Any:
    """By indices of other dimensions than the rows', by a new order of rows, or at one place in each row."""
    value, indices = call["self"], call["indices"]
    placement = value.placement
    at = [dim for dim, each in enumerate(indices) if type(each) is TensorLayout]
    if not at or any(indices[dim].dtype in (torch.bool, torch.uint8) for dim in at):
        return None
    wide, together = max(len(indices[dim].shape) for dim in at), at == list(range(at[0], at[-1] + 1))
    if placement is None and call.lead is not None:  # rows of a table
        dim = (at[0] if together else 0) + wide - len(call.lead.shape) + call.placement.dim
        return Way(at={"self": None}, results=call.placement._replace(dim=dim))
    if type(placement) is not Placement:
        return None
    if placement.dim in at:
        first = indices[placement.dim]
        if at == [0] and placement.dim == 0 and placement.outer == 1 and first.shape == (placement.total,):
            return lambda operator, arguments, options: _taken(operator, (arguments[0], 0, arguments[1][0]), options)
        if _is_each_row(indices, at, placement):
            return _index_each_row
        return None
    if not together or any(type(each.placement) is Placement for each in call.layouts if each is not value):
        return None
    results = placement._replace(dim=placement.dim + (wide - len(at)) * (at[0] < placement.dim))
    return Way(at={"self": placement, "indices": [None] * len(indices)}, results=results)


def _is_each_row(indices: Any, at: list[int], placement: Placement) -> bool:
    """Returns whether indices may be x[range(n), y]: each of n numbers, from the first dimension on."""
    return (
        placement.dim == 0
        and placement.outer == 1
        and at == list(range(len(at)))
        and len(at) > 1
        and all(each.shape == (placement.total,) for each in indices[: len(at)])
    )


def _own_indices(placement: Placement, indices: Any) -> Any:
    """Returns the indices for own rows of x[range(n), y]; None if the first are not all rows in their order."""
    first = full(indices[0])
    if not torch.equal(first, torch.arange(placement.total, dtype=first.dtype, device=first.device)):
        return None
    rows = torch.arange(placement.rows, dtype=first.dtype, device=first.device)
    along = placement._replace(dim=0)
    return [rows, *(own_of(each, along) for each in indices[1:])]


def _index_each_row(operator: Any, arguments: Any, options: Any) -> Any:
    value, indices = arguments
    placement = value._cell.layout.placement
    own = _own_indices(placement, indices)
    if own is None:
        return NotImplemented
    made = operator(own_local(value), own)
    shape = (placement.total, *made.shape[1:])
    return wrapped(made, contiguous(shape, value._cell.layout, placement))


@procedure("index_put index_put_ _index_put_impl_ _unsafe_index_put")
def _index_put(operator: Any, arguments: Any, options: Any) -> Any:
    """A number into masked places, or one into each row; else gathered."""
    value, indices, new, *rest = arguments
    cell = value._cell if type(value) is Rows else None
    placement = None if cell is None else cell.layout.placement
    at = [dim for dim, each in enumerate(indices) if each is not None]
    if type(placement) is not Placement:
        adds = bool(rest and rest[0]) and not operator_schema(operator).is_mutable and placement is not GHOST
        return _added_by_index(operator, value, indices, at, new) if adds else NotImplemented
    if at == [0] and indices[0].dtype is torch.bool and new.numel() == 1 and placement.dim < indices[0].dim():
        own = [own_of(indices[0], placement)]
        values = full(new)
    elif at and all(indices[dim].dtype is torch.int64 for dim in at) and _is_each_row(indices, at, placement):
        own = _own_indices(placement, indices)
        if (
            own is None
            or (new.dim() and new.shape[0] not in (1, placement.total))
            or new.dim() > value.dim() - len(at) + 1
        ):
            return NotImplemented
        is_row_each = new.dim() == value.dim() - len(at) + 1 and new.shape[0] == placement.total
        values = own_of(new, placement._replace(dim=0)) if is_row_each else full(new)
    else:
        return NotImplemented
    own_memory(cell)  # type: ignore[arg-type]
    local = own_local(value)
    made = operator(local, own, values, *rest, **options)
    if not operator_schema(operator).is_mutable:
        return wrapped(made, cell.layout.placed(placement))  # type: ignore[union-attr]
    return written(value)


def _added_by_index(operator: Any, table: Any, indices: Any, at: list[int], new: Any) -> Any:
    """Rows that are added into a table are terms of it."""
    first = indices[at[0]]
    placement = first._cell.layout.placement if type(first) is Rows else None
    if placement is None and type(new) is Rows and type(of_new := new._cell.layout.placement) is Placement:
        placement = of_new._replace(dim=of_new.dim - at[0]) if at[0] <= of_new.dim < at[0] + first.dim() else None
    shape = (*table.shape[: at[0]], *first.shape, *table.shape[at[-1] + 1 :])
    alike = all(indices[dim].shape == first.shape and indices[dim].dtype is torch.int64 for dim in at)
    if type(placement) is not Placement or not alike or at[-1] - at[0] >= len(at) or new.shape != shape:
        return NotImplemented
    own = [None if each is None else own_of(each, placement) for each in indices]
    values = own_of(new, placement._replace(dim=placement.dim + at[0]))
    every = full(table)
    made = operator(every if NOW.context.rank == 0 else torch.zeros_like(every), own, values, True)
    return wrapped(made, layout_of(made.shape, made.stride(), made.dtype, made.device, PARTIAL))


@rule("select_backward slice_backward")
def _view_backward(call: RuleCall) -> Way | None:
    """Gradients of views: zeros, and the gradient in its place."""
    grad, sizes = call["grad_output"], call["input_sizes"]
    placement = grad.placement
    if placement is PARTIAL:
        return Way(at={"grad_output": PARTIAL}, results=PARTIAL)
    if type(placement) is not Placement:
        return all_of(call)
    dim = call["dim"] % len(sizes)
    at = placement.dim + (call.name == "select_backward" and dim <= placement.dim)
    if dim == at or sizes[at] != grad.shape[placement.dim]:
        return None
    constants = {"input_sizes": [*sizes[:at], grad.local_shape[placement.dim], *sizes[at + 1 :]]}
    return Way(at={"grad_output": placement}, constants=constants, results=placement._replace(dim=at))


# ---- Together ----------------------------------------------------------------------------------------------


@rule_of_rows("cat")
def _cat(call: RuleCall) -> Way | None:
    layouts, lead, placement = call["tensors"], call.lead, call.placement
    if any(len(each.shape) != len(lead.shape) for each in layouts):  # one is [0], which torch skips
        return None
    if call["dim"] % len(lead.shape) != placement.dim:
        if any(each.shape[placement.dim] != lead.shape[placement.dim] for each in layouts):
            return None
        return Way(at={"tensors": [placement] * len(layouts)}, results=placement)
    total = placement.total
    if not total or any(each.shape[placement.dim] % total for each in layouts):
        return None
    outers = [each.shape[placement.dim] // total for each in layouts]
    places = [placement._replace(outer=outer) if outer else None for outer in outers]
    return Way(at={"tensors": places}, results=placement._replace(outer=sum(outers)))


@rule_of_rows("stack")
def _stack(call: RuleCall) -> Way | None:
    layouts, placement, lead = call["tensors"], call.placement, call.lead
    if any(each.shape != lead.shape for each in layouts):
        return None
    after = call["dim"] % (len(lead.shape) + 1) <= placement.dim
    return Way(at={"tensors": [placement] * len(layouts)}, results=placement._replace(dim=placement.dim + after))


@rule_of_rows("repeat")
def _repeat(call: RuleCall) -> Way | None:
    value, repeats, placement = call["self"], call["repeats"], call.placement
    dim = placement.dim + len(repeats) - len(value.shape)
    return Way(at={"self": placement}, results=placement._replace(dim=dim, outer=placement.outer * repeats[dim]))


# ---- Products ----------------------------------------------------------------------------------------------


@rule("mm bmm mv dot vdot")
def _product(call: RuleCall) -> Way | None:
    """a [.., m, k] x b [.., k, n]."""
    names = call.names[:2]
    a, b = (call[name] for name in names)
    places = [each.placement for each in (a, b)]
    terms = [each is PARTIAL for each in places]
    if any(terms) and all(each is None or each is PARTIAL for each in places) and sum(terms) == 1:
        return Way(at=dict(zip(names, [PARTIAL if each else None for each in terms], strict=True)), results=PARTIAL)
    at, bt = (each if type(each) is Placement else None for each in places)
    if at is None and bt is None:
        return all_of(call)
    rows = 1 if call.name == "bmm" else 0
    inner = (len(a.shape) - 1, len(b.shape) - 1 - (call.name in ("mm", "bmm")))
    batch = at if at and rows and at.dim == 0 else bt if bt and rows and bt.dim == 0 else None
    if batch is not None:
        return Way(at=dict.fromkeys(names, batch), results=batch)
    contracted = at if at and at.dim == inner[0] else bt if bt and bt.dim == inner[1] and not at else None
    if contracted is not None:
        own = [contracted._replace(dim=dim) for dim in inner]
        return Way(at=dict(zip(names, own, strict=True)), results=PARTIAL)
    return Way(at=dict(zip(names, (at, None if at else bt), strict=True)), results=at or bt)


@rule("addmm baddbmm addmv")
def _added_product(call: RuleCall) -> Any:
    bias, a, b = (call[name] for name in call.names[:3])
    at = a.placement
    if call.name == "addmm" and type(at) is Placement and at.dim == 0 and b.placement is None:
        try:
            own = None if len(bias.shape) < 2 else call.aligned(bias, a)
        except Unalike:
            return _apart
        return Way(at=dict(zip(call.names[:3], (own, at, None), strict=True)), results=at)
    return _apart


def _apart(operator: Any, arguments: Any, options: Any) -> Any:
    """A product, and then a sum."""
    if len(arguments) != 3:
        return NotImplemented
    bias, a, b = arguments
    plain = {"addmm": aten.mm, "baddbmm": aten.bmm, "addmv": aten.mv}[operator.overloadpacket.__name__].default
    made = plain(a, b)
    alpha, beta = options.get("alpha", 1), options.get("beta", 1)
    made = made if alpha == 1 else made * alpha
    if beta == 0:
        return made.expand(torch.broadcast_shapes(made.shape, bias.shape)).clone()
    return made + (bias if beta == 1 else bias * beta)


@rule_of_rows("_cdist_forward _cdist_backward")
def _cdist(call: RuleCall) -> Way | None:
    """Distances of x1's rows to all of x2, or of batches of both; a gradient is that of x1."""
    x1, x2, placement = call["x1"], call["x2"], call.placement
    if len(x1.shape) != len(x2.shape) or any(
        each is not x2 and len(each.shape) != len(x1.shape) for each in call.layouts
    ):
        return None
    tensors = [*everywhere(call, None)]
    if placement.dim < len(x1.shape) - 2:
        if any(call[name].shape[placement.dim] != x1.shape[placement.dim] for name in tensors):
            return None
        return Way(at=dict.fromkeys(tensors, placement), results=placement)
    grad = call.values.get("grad", x2)
    if grad is not x2 and type(grad.placement) is Placement and grad.placement.dim == len(x1.shape) - 1:
        if x1.placement is not None:
            return None
        at = {"x1": None, "x2": grad.placement._replace(dim=len(x1.shape) - 2)}
        return Way(at=at | {name: grad.placement for name in tensors if name not in at}, results=PARTIAL)
    of_rows = x1.placement if type(x1.placement) is Placement else grad.placement
    if type(of_rows) is not Placement or of_rows.dim != len(x1.shape) - 2:
        return None
    return Way(at={name: None if name == "x2" else of_rows for name in tensors}, results=of_rows)


# ---- Samples -----------------------------------------------------------------------------------------------


@rule_of_rows("convolution", first=True)
def _convolution(call: RuleCall) -> Way | None:
    placement = call["input"].placement
    if type(placement) is not Placement:
        return None
    return Way(at={"input": placement, "weight": None, "bias": None}, results=placement)


@rule_of_rows("convolution_backward", first=True)
def _convolution_backward(call: RuleCall) -> Way | None:
    placement = call.placement
    if type(call["weight"].placement) is Placement:
        return None
    at = {"grad_output": placement, "input": placement, "weight": None}
    return Way(at=at, results=(placement, PARTIAL, PARTIAL))


_LEADING = {
    1: """
        reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward upsample_nearest1d
        upsample_linear1d _upsample_nearest_exact1d avg_pool1d adaptive_avg_pool1d upsample_nearest1d_backward
        upsample_linear1d_backward _upsample_nearest_exact1d_backward
    """,
    2: """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward upsample_nearest2d
        _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward
        linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet _linalg_eigh _linalg_svd linalg_qr
        linalg_lu_factor_ex _linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_solve linalg_matrix_exp
        upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
        _upsample_nearest_exact2d_backward col2im
    """,
    3: """
        max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d
        reflection_pad3d replication_pad3d adaptive_max_pool3d pixel_shuffle pixel_unshuffle channel_shuffle
        upsample_nearest3d_backward upsample_trilinear3d_backward _upsample_nearest_exact3d_backward
        im2col grid_sampler_2d grid_sampler_2d_backward
    """,
    4: "grid_sampler_3d grid_sampler_3d_backward",
}
"""Operators on the last 1, 2, 3 or 4 dimensions of each tensor, alike for all others."""
_LEADING_BY_NAME = {name: count for count, names in _LEADING.items() for name in names.split()}


@rule_of_rows(f"constant_pad_nd {' '.join(_LEADING.values())}")
def _leading(call: RuleCall) -> Way | None:
    """Operators on last dimensions: rows are in one of the others."""
    placement, count = call.placement, len(call.lead.shape)
    last = len(call["pad"]) // 2 if call.name == "constant_pad_nd" else _LEADING_BY_NAME[call.name]
    if placement.dim >= count - last or any(len(each.shape) != count for each in call.layouts):
        return None
    sizes = {"input_size": [*call["input_size"]]} if "input_size" in call.values else {}
    for size in sizes.values():
        size[placement.dim] = call.lead.local_shape[placement.dim]
    return Way(constants=sizes, results=placement)


@rule_of_rows("embedding")
def _embedding(call: RuleCall) -> Way | None:
    if type(call["weight"].placement) is Placement:
        return None
    return Way(at={"weight": None, "indices": call.placement}, results=call.placement)


@rule("embedding_dense_backward")
def _embedding_backward(call: RuleCall) -> Way | None:
    if call.lead is None:
        if call["grad_output"].placement is PARTIAL:
            return Way(at={"grad_output": PARTIAL, "indices": None}, results=PARTIAL)
        return all_of(call)
    places = [call[name].placement for name in ("grad_output", "indices")]
    placement = next(each for each in places if type(each) is Placement)
    if placement.dim >= len(call["indices"].shape):
        return None
    return Way(at=dict.fromkeys(("grad_output", "indices"), placement), results=PARTIAL)


@rule_of_rows("_thnn_fused_lstm_cell _thnn_fused_gru_cell", first=True)
def _cell_of_gpu(call: RuleCall) -> Way | None:
    """A step of a recurrent layer on a GPU."""
    at = {name: call.placement if len(call[name].shape) > 1 else None for name in everywhere(call, None)}
    return Way(at=at, results=call.placement)
