"""OwnRows: rows within a module, whose record of autograd is that of this process's own part.

A function of FUNCTIONS gives for own rows the own rows of its result; it is called with them, and its backward is
plain torch, which costs no Python. Any other function gets rows (`grappe.rows.tensor`) in their place.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.errors import GrappeError
from grappe.private_api.torch import FUNCTION_OWNERS, no_subclass_functions, tree_leaves, tree_map, wrapper_maker
from grappe.rows.context import NOW
from grappe.rows.draws import fill_own
from grappe.rows.layout import Placement, dense_stride, layout_of
from grappe.rows.messages import own_part
from grappe.rows.regions import FromLocal, Shared, ToLocal
from grappe.rows.tensor import Rows, own_local
from grappe.rows.views import reshaped

Rule = Callable[[Any, Any, Any], Any]
"""Returns the result of (function, arguments, options), or NotImplemented: rows are taken."""
FUNCTIONS: dict[Any, tuple[Rule, int]] = {}
"""Rules by function, each with a number of the function that all processes have."""


class OwnMemory:
    """State that views of one memory share."""

    __slots__ = ("is_lent", "is_viewed", "is_written", "source")

    def __init__(self, source: Rows | None = None) -> None:
        self.source = source
        """Rows outside of the module, which have this memory."""
        self.is_lent = self.is_viewed = False
        """Whether rows, or rows within the module, that are a view of it exist."""
        self.is_written = False
        """Whether it was written to as rows, of which this record of autograd knows nothing."""


class OwnRows(Tensor):
    """A tensor of all rows within a module, by this process's own."""

    __slots__ = ("_local", "_memory", "_place", "_rows")
    _local: Tensor
    _memory: OwnMemory
    _place: Placement
    _rows: tuple[Rows, int] | None
    """The same as rows, with the version of `_local` that they were made of."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        rule = FUNCTIONS.get(function)
        if rule is not None:
            now = NOW.context
            now.dispatched += 1
            now.trace = hash((now.trace, rule[1]))
            try:
                made = rule[0](function, arguments, options or {})
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError, TypeError, ValueError):  # rows make the error that one process has
                made = NotImplemented
            if made is not NotImplemented:
                return made
        return _through_rows(function, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:  # type: ignore[override]
        # What no function announces: an extension of C++, for instance. Its gradients would be lost.
        own = [each for each in tree_leaves((arguments, options)) if type(each) is OwnRows]
        if torch.is_grad_enabled() and any(each._local.requires_grad for each in own):
            raise GrappeError(
                f"{operator} takes rows of a batch within a module ({NOW.context.line()}), where torch does not say so "
                "before. Call it with tensor.detach(), or in a torch.autograd.Function"
            )
        arguments, options = tree_map(as_rows, (arguments, options or {}))
        return operator(*arguments, **options)


def _make(local: Tensor, place: Placement, memory: OwnMemory) -> OwnRows:
    layout = _layout(local.shape, local.stride(), local.dtype, local.device, place, NOW.context.rank)
    made: Any = wrapper_maker(OwnRows, *layout)
    made._local, made._place, made._memory, made._rows = local, place, memory, None
    return made


@functools.lru_cache(maxsize=20_000)
def _layout(shape: Any, stride: Any, dtype: Any, device: Any, place: Placement, _: int) -> Any:
    dim = place.dim
    every = torch.Size((*shape[:dim], place.outer * place.total, *shape[dim + 1 :]))
    return every, dense_stride(every, stride), None, None, dtype, torch.strided, device


def _new(local: Tensor, place: Placement) -> OwnRows:
    return _make(local, place, OwnMemory())


def _local(value: Any) -> Tensor:
    """Returns the own rows of a value, for a function of it."""
    if value._memory.is_written:
        raise _refused("a write to rows of which a module has kept a part", "have the module keep a clone")
    return value._local


def _refused(what: str, instead: str) -> GrappeError:
    return GrappeError(f"grappe has no rule for {what} ({NOW.context.line()}): {instead}")


# ---- To and from rows --------------------------------------------------------------------------------------


def as_own(value: Any) -> Any:
    """Returns rows as a module's; other values as they are."""
    if type(value) is not Rows:
        return value
    place = value._cell.layout.placement
    if type(place) is not Placement or not all(place.sizes) or value._cell.ghost is not None:
        return value
    # Under no_grad too: a part of what has a gradient may be asked for it.
    local = ToLocal.apply(value, place) if value.requires_grad else own_local(value)
    return _make(local, place, OwnMemory(value))


def as_rows(value: Any) -> Any:
    """Returns a module's rows as rows; other values as they are."""
    if type(value) is not OwnRows:
        return value
    local, version = _local(value), None if value._local.is_inference() else value._local._version
    if value._rows is not None and value._rows[1] == version is not None:
        return value._rows[0]
    rows = FromLocal.apply(local, value._place)
    rows._cell.shares().lent = value._memory
    if rows.requires_grad or not local.requires_grad:  # not under no_grad
        value._rows = rows, version
    return rows


def _through_rows(function: Any, arguments: Any, options: Any) -> Any:
    """Calls a function with rows; results that are rows are a module's again."""
    name = getattr(function, "__name__", "")
    if name in ("__set__", "__delete__"):
        raise _refused(f"a write to Tensor.{function.__self__.__name__}", "set it outside of the module")
    if name.endswith("_") and not name.endswith("__") or name in _IN_PLACE or options.get("inplace") is True:
        return _written(function, arguments, options)
    taken = [each for each in tree_leaves((arguments, options)) if type(each) is OwnRows]
    arguments, options = tree_map(as_rows, (arguments, options))
    made = function(*arguments, **options)
    if not any(type(each) is Rows for each in tree_leaves(made)):
        return made
    before = {id(as_rows(each)): each for each in taken}

    def result(each: Any) -> Any:
        if type(each) is not Rows:
            return each
        if id(each) in before:
            return before[id(each)]
        if each._is_view() and id(each._base) in before:
            before[id(each._base)]._memory.is_lent = True
            return each
        return _unshared(each)

    return tree_map(result, made)


def _unshared(rows: Rows) -> Any:
    own = as_own(rows)
    if type(own) is OwnRows:
        own._memory.source = None
    return own


_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_IN_PLACE |= {"__setitem__"}


def _written(function: Any, arguments: Any, options: Any) -> Any:
    """Calls a function that writes to its first argument."""
    first, *others = arguments
    others, options = tree_map(as_rows, (others, options))
    if type(first) is not OwnRows:
        return function(first, *others, **options)
    _writable(first)
    source = first._memory.source
    rows: Any = as_rows(first).clone() if source is None else source
    made = function(rows, *others, **options)
    if source is None:
        first._local.copy_(ToLocal.apply(rows, first._place))
    else:
        first._local, first._rows = as_own(rows)._local, None
    return first if made is rows else made


def _writable(value: OwnRows) -> None:
    """Checks that a write reaches all that have the memory."""
    memory = value._memory
    if memory.is_lent or (memory.source is not None and memory.is_viewed):
        raise _refused("a write to a view within a module", "write to a clone of it")


# ---- Rules -------------------------------------------------------------------------------------------------


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def add(made: Rule) -> Rule:
        for each in functions:
            code = zlib.crc32(getattr(each, "__qualname__", str(each)).encode())
            FUNCTIONS[each] = made, code
        return made

    return add


def _named(owners: Iterable[Any], names: str) -> list[Any]:
    """Returns the functions of these names, wherever torch has them."""
    return [getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)]



def _weight(value: Any) -> Any:
    """Returns a tensor that all processes have, whose gradient is the sum of the processes' terms."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    twin = NOW.context.twin(value)
    return Shared.apply(value) if twin is None else twin


def _aligned(values: Iterable[Any], options: Any) -> tuple[list[Any], OwnRows] | None:
    """Returns the own parts of values that are broadcast, and the one of most dimensions; None: they do not fit."""
    lead: Any = None
    for each in values:
        if type(each) is OwnRows and (lead is None or each._local.dim() > lead._local.dim()):
            lead = each
    if lead is None or any(isinstance(each, Tensor) for each in options.values()):
        return None
    place, dims = lead._place, lead._local.dim()
    made = []
    for each in values:
        kind = type(each)
        if kind is OwnRows:
            own = each._place
            if own is not place or each._local.dim() != dims:
                if own[1:] != place[1:] or own.dim - each._local.dim() != place.dim - dims:
                    return None
            made.append(_local(each))
        elif kind is Tensor or kind is nn.Parameter:
            dim = place.dim - dims + each.dim()
            if each.layout is not torch.strided:
                return None
            taken = _weight(each)
            if dim >= 0 and each.shape[dim] != 1:
                if each.shape[dim] != place.outer * place.total:
                    return None
                taken = own_part(taken, place._replace(dim=dim))
            made.append(taken)
        elif isinstance(each, Tensor) or kind is list or kind is tuple:
            return None
        else:
            made.append(each)
    return made, lead


@_rule(
    *_named(
        FUNCTION_OWNERS,
        "abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max "
        "clamp_min clip copysign cos cosh div divide elu eq erf erfc exp exp2 expm1 floor floor_divide fmod frac ge "
        "gelu greater gt hardsigmoid hardswish hardtanh isfinite isinf isnan ldexp le leaky_relu lerp less log log10 "
        "log1p log2 logaddexp logical_and logical_not logical_or logical_xor logsigmoid log_sigmoid lt masked_fill "
        "maximum minimum mish mul multiply nan_to_num ne neg negative pow prelu reciprocal relu relu6 remainder round "
        "rsqrt rsub selu sigmoid sign silu sin sinh softplus softsign sqrt square sub subtract tan tanh tanhshrink "
        "threshold true_divide trunc where xlogy "
        "ones_like zeros_like full_like bool byte double float half bfloat16 int long clone contiguous detach",
    ),
    *_named(
        (Tensor,),
        "__abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ "
        "__ne__ __neg__ __or__ __pow__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__ "
        "__xor__",
    ),
)
def _pointwise(function: Any, arguments: Any, options: Any) -> Any:
    if options.get("inplace") is True:
        return _in_place(function, arguments, options)
    taken = None if "out" in options else _aligned(arguments, options)
    if taken is None:
        return NotImplemented
    values, lead = taken
    made = function(*values, **options)
    if made is lead._local:
        return lead
    return _make(made, lead._place, lead._memory) if function in _VIEWS else _new(made, lead._place)


_VIEWS = {*_named((torch, Tensor), "detach contiguous bool byte double float half bfloat16 int long to")}
"""Functions whose result may be a view of an argument, or it itself."""


@_rule(*_named((Tensor,), "to"))
def _converted(function: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    if any(isinstance(each, Tensor) for each in (value, *rest, *options.values())[1:]):
        return NotImplemented
    return _pointwise(function, arguments, options)


@_rule(
    *_named((torch, Tensor), "add_ sub_ mul_ div_ relu_ clamp_ sigmoid_ tanh_ exp_ neg_ masked_fill_ zero_ fill_"),
    *_named((Tensor,), "__iadd__ __isub__ __imul__ __itruediv__"),
)
def _in_place(function: Any, arguments: Any, options: Any) -> Any:
    first = arguments[0]
    taken = _aligned(arguments, options)
    if taken is None or taken[1]._local.dim() != first._local.dim() or type(first) is not OwnRows:
        return NotImplemented
    if first._memory.source is not None or first._memory.is_lent:
        return NotImplemented
    function(*taken[0], **options)
    return first


@_rule(
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse")),
    *_named((Tensor,), "size dim numel nelement __len__ element_size is_floating_point is_complex"),
    *_named((torch,), "is_floating_point is_complex numel"),
)
def _property(function: Any, arguments: Any, options: Any) -> Any:
    """Properties of all rows, which the wrapper has."""
    with no_subclass_functions():
        return function(*arguments, **options)


@_rule(Tensor.requires_grad.__get__, Tensor.is_leaf.__get__, Tensor.grad_fn.__get__)  # type: ignore[attr-defined]
def _recorded(function: Any, arguments: Any, options: Any) -> Any:
    return function(arguments[0]._local)


def _bound(function: Any, names: str, arguments: Any, options: Any) -> list[Any] | None:
    """Returns the arguments by names, None where one is left out; None: there are others."""
    order = names.split()
    if len(arguments) > len(order) or not options.keys() <= set(order):
        return None
    return [arguments[at] if at < len(arguments) else options.get(name) for at, name in enumerate(order)]


@_rule(*_named((F,), "linear"), *_named((torch, Tensor), "matmul __matmul__ bmm mm"))
def _product(function: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    if options or type(value) is not OwnRows:
        return NotImplemented
    other, place, dims = rest[0], value._place, value._local.dim()
    if type(other) is OwnRows or other.dim() > 2:
        taken = _aligned((value, other), options)
        if taken is None or place.dim >= dims - 2 or taken[1]._local.dim() > dims or function is F.linear:
            return NotImplemented
        return _new(function(*taken[0]), place)
    if place.dim == dims - 1 or type(other) not in (Tensor, nn.Parameter):
        return NotImplemented
    return _new(function(_local(value), *(None if each is None else _weight(each) for each in rest)), place)


@_rule(F.scaled_dot_product_attention)
def _attention(function: Any, arguments: Any, options: Any) -> Any:
    taken = _bound(function, "query key value attn_mask dropout_p is_causal scale enable_gqa", arguments, options)
    if taken is None or taken[4] or not all(type(each) is OwnRows for each in taken[:3]):
        return NotImplemented
    parts = _aligned([each for each in taken[:4] if each is not None], {})
    if parts is None or parts[1]._place.dim >= parts[1]._local.dim() - 2:
        return NotImplemented
    own, lead = parts
    mask = own[3] if len(own) == 4 else None
    return _new(function(*own[:3], mask, 0.0, bool(taken[5]), scale=taken[6], enable_gqa=bool(taken[7])), lead._place)


@_rule(F.embedding)
def _embedding(function: Any, arguments: Any, options: Any) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    taken = _bound(function, names, arguments, options)
    if taken is None or taken[3] is not None or taken[5] or taken[6] or type(taken[0]) is not OwnRows:
        return NotImplemented
    weight = taken[1]
    if type(weight) not in (Tensor, nn.Parameter):
        return NotImplemented
    return _new(function(_local(taken[0]), _weight(weight), taken[2]), taken[0]._place)


@_rule(F.layer_norm, *_named((F,), "rms_norm"))
def _normalized(function: Any, arguments: Any, options: Any) -> Any:
    taken = _bound(function, "input normalized_shape weight bias eps", arguments, options)
    value = arguments[0] if arguments else None
    if type(value) is not OwnRows or taken is None:
        return NotImplemented
    shape = arguments[1] if len(arguments) > 1 else options["normalized_shape"]
    if value._place.dim >= value._local.dim() - len(shape):
        return NotImplemented
    rest = [_weight(each) if isinstance(each, Tensor) else each for each in arguments[1:]]
    named = {name: _weight(each) if isinstance(each, Tensor) else each for name, each in options.items()}
    return _new(function(_local(value), *rest, **named), value._place)


def _over_last(count: int, functions: Any, *, leading: int | None = None) -> None:
    """Registers functions of the last dimensions; of one sample alone where `leading` dimensions must be ahead."""

    def rule(function: Any, arguments: Any, options: Any) -> Any:
        value, *rest = arguments
        if type(value) is not OwnRows or "out" in options:
            return NotImplemented
        dims, place = value._local.dim(), value._place
        if place.dim >= dims - count - (leading or 0) or (leading is not None and dims != count + 1 + leading):
            return NotImplemented
        if any(type(each) is OwnRows or type(each) is Rows for each in (*rest, *options.values())):
            return NotImplemented
        rest = [_weight(each) if isinstance(each, Tensor) else each for each in rest]
        options = {name: _weight(each) if isinstance(each, Tensor) else each for name, each in options.items()}
        made = function(_local(value), *rest, **options)
        return _each(made, place)

    _rule(*functions)(rule)


def _each(made: Any, place: Placement) -> Any:
    if isinstance(made, Tensor):
        return _new(made, place)
    return type(made)([_new(each, place) for each in made])


for _count in (1, 2, 3):
    _over_last(_count, _named((torch,), f"conv{_count}d conv_transpose{_count}d"), leading=1)
    _pools = " ".join(f"{kind}_pool{_count}d" for kind in ("avg", "adaptive_avg", "max", "adaptive_max"))
    _over_last(_count, _named(FUNCTION_OWNERS, _pools), leading=1)
_over_last(3, _named((torch, F), "pixel_shuffle pixel_unshuffle"))


@_rule(F.group_norm, F.interpolate)
def _of_samples(function: Any, arguments: Any, options: Any) -> Any:
    """Functions of each sample, in the first dimension."""
    value, *rest = arguments
    if type(value) is not OwnRows or value._place.dim or value._local.dim() < 3:
        return NotImplemented
    rest = [_weight(each) if isinstance(each, Tensor) else each for each in rest]
    options = {name: _weight(each) if isinstance(each, Tensor) else each for name, each in options.items()}
    return _new(function(_local(value), *rest, **options), value._place)


@_rule(F.batch_norm)
def _batch_norm(function: Any, arguments: Any, options: Any) -> Any:
    names = "input running_mean running_var weight bias training momentum eps"
    taken = _bound(function, names, arguments, options)
    if taken is None or taken[5] or type(taken[0]) is not OwnRows or taken[0]._place.dim == 1:
        return NotImplemented
    value, mean, variance, weight, bias, _, _, eps = taken
    weight, bias = (None if each is None else _weight(each) for each in (weight, bias))
    return _new(function(_local(value), mean, variance, weight, bias, False, 0.0, 1e-5 if eps is None else eps),
                value._place)  # fmt: skip


@_rule(F.pad)
def _padded(function: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    pad = rest[0] if rest else options["pad"]
    if type(value) is not OwnRows or value._place.dim >= value._local.dim() - len(pad) // 2:
        return NotImplemented
    return _new(function(_local(value), *rest, **options), value._place)


@_rule(F.dropout)
def _dropout(function: Any, arguments: Any, options: Any) -> Any:
    """Dropout on a CPU, as torch has it: noise of all rows, of which own ones are drawn."""
    taken = _bound(function, "input p training inplace", arguments, options)
    if taken is None or type(taken[0]) is not OwnRows or taken[3]:
        return NotImplemented
    value, p, training, _ = taken
    p, training = 0.5 if p is None else p, training is not False
    if not training or p == 0:
        return value
    local = _local(value)
    every = _layout(local.shape, local.stride(), local.dtype, local.device, value._place, NOW.context.rank)
    layout = layout_of(every[0], every[1], local.dtype, local.device, value._place)
    noise = torch.empty_strided(layout.local_shape, layout.local_stride, dtype=local.dtype, device=local.device)
    if not 0 < p < 1 or not fill_own(torch.ops.aten.bernoulli_.float, noise, layout, (1 - p,), {}):
        return NotImplemented
    return _new(local * noise.div_(1 - p), value._place)


@_rule(*_named((F, torch, Tensor), "softmax log_softmax softmin normalize logsumexp sum mean amax amin max min argmax "
               "argmin var std norm prod all any cumsum cumprod sort argsort topk flip glu"))  # fmt: skip
def _along(function: Any, arguments: Any, options: Any) -> Any:
    """Functions along other dimensions than the rows'."""
    value, *rest = arguments
    at = _DIM.get(getattr(function, "__name__", ""), 0)
    dims = options.get("dim", rest[at] if len(rest) > at else None)
    if type(value) is not OwnRows or "out" in options or any(isinstance(e, Tensor) for e in (*rest, *options.values())):
        return NotImplemented
    if type(dims) is int:
        dims = (dims,)
    place, count = value._place, value._local.dim()
    if type(dims) not in (tuple, list) or not dims or any(type(dim) is not int for dim in dims):
        return NotImplemented
    gone = {dim % count for dim in dims}
    if place.dim in gone:
        return NotImplemented
    made = function(_local(value), *rest, **options)
    results = made if isinstance(made, (tuple, list)) else [made]
    if results[0].dim() != count:
        place = place._replace(dim=place.dim - sum(dim < place.dim for dim in gone))
    return _each(made, place)


_DIM = {"normalize": 1, "norm": 1, "topk": 1}
"""Place of the argument `dim` after the tensor, if it is not the first."""


# ---- Views -------------------------------------------------------------------------------------------------


def _seen(value: OwnRows, local: Tensor, place: Placement) -> OwnRows:
    """Returns a view, or what may be one."""
    value._memory.is_viewed = True
    return _make(local, place, value._memory)


def _sizes(rest: Any) -> Any:
    return rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest


@_rule(Tensor.view, Tensor.reshape, torch.reshape)
def _reshaped(function: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    size = tuple(_sizes(rest))
    if type(value) is not OwnRows or options or not all(type(each) is int for each in size):
        return NotImplemented
    made = reshaped(value._local.shape, size, value._place)
    if made is None:
        return NotImplemented
    place, own = made
    return _seen(value, function(_local(value), own), place)


@_rule(Tensor.flatten, torch.flatten)
def _flattened(function: Any, arguments: Any, options: Any) -> Any:
    taken = _bound(function, "input start_dim end_dim", arguments, options)
    if taken is None or type(taken[0]) is not OwnRows or taken[0]._local.dim() < 1:
        return NotImplemented
    value, start, end = taken
    shape = _shape(value)
    start, end = (0 if start is None else start) % len(shape), (-1 if end is None else end) % len(shape)
    return _reshaped(Tensor.reshape, (value, *shape[:start], -1, *shape[end + 1 :]), {})


def _shape(value: OwnRows) -> Any:
    with no_subclass_functions():
        return value.shape


@_rule(*_named((torch, Tensor), "transpose swapaxes permute t unsqueeze squeeze movedim"), Tensor.T.__get__,
       Tensor.mT.__get__)  # type: ignore[attr-defined]  # fmt: skip
def _turned(function: Any, arguments: Any, options: Any) -> Any:
    """Dimensions in another order, or with others of size 1."""
    value, *rest = arguments
    if type(value) is not OwnRows or options:
        return NotImplemented
    if function in _SQUEEZES and (len(rest) != 1 or rest[0] % value._local.dim() == value._place.dim):
        return NotImplemented
    place = value._place
    made = function(_local(value), *rest)
    # Where the rows' dimension is afterwards is asked of torch.
    dim = _dimension_after(function, value._local.dim(), place.dim, tuple(map(_hashable, rest)))
    return _seen(value, made, place if dim == place.dim else place._replace(dim=dim))


_SQUEEZES = {torch.squeeze, Tensor.squeeze}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=4096)
def _dimension_after(function: Any, dims: int, dim: int, rest: Any) -> int:
    marked = torch.empty([2 if at == dim else 1 for at in range(dims)], device="meta")
    return list(function(marked, *rest).shape).index(2)


@_rule(Tensor.expand, torch.Tensor.expand_as)
def _expanded(function: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    size = list(_sizes(rest))
    if type(value) is not OwnRows or options or not all(type(each) is int for each in size):
        return NotImplemented
    dim = value._place.dim + len(size) - value._local.dim()
    if size[dim] not in (-1, _shape(value)[value._place.dim]):
        return NotImplemented
    size[dim] = -1
    return _seen(value, _local(value).expand(size), value._place._replace(dim=dim))


@_rule(*_named((torch, Tensor), "split chunk unbind"))
def _parted(function: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    at = 0 if getattr(function, "__name__", "") == "unbind" else 1
    dim = options.get("dim", rest[at] if len(rest) > at else 0)
    if type(value) is not OwnRows or type(dim) is not int or dim % value._local.dim() == value._place.dim:
        return NotImplemented
    place = value._place
    if not at:
        place = place._replace(dim=place.dim - (dim % value._local.dim() < place.dim))
    return type(made := function(_local(value), *rest, **options))([_seen(value, each, place) for each in made])


@_rule(Tensor.__getitem__)
def _indexed(function: Any, arguments: Any, options: Any) -> Any:
    value, index = arguments
    if type(value) is not OwnRows:
        return NotImplemented
    index = index if type(index) is tuple else (index,)
    left = value._local.dim() - sum(type(each) in (int, slice) for each in index)
    at = before = 0
    dim, rows = None, value._place.dim
    for each in index:
        kind = type(each)
        if each is Ellipsis:
            if at <= rows < at + left:
                dim = before + rows - at
            at, before, left = at + left, before + left, 0
        elif each is None:
            before += 1
        elif kind is slice:
            if at == rows:
                if each != slice(None):
                    return NotImplemented
                dim = before
            at, before = at + 1, before + 1
        elif kind is int and at != rows:
            at += 1
        else:
            return NotImplemented
    if dim is None:
        if at > rows:
            return NotImplemented
        dim = before + rows - at
    return _seen(value, function(_local(value), index), value._place._replace(dim=dim))


@_rule(torch.cat, torch.concat, torch.stack)
def _joined(function: Any, arguments: Any, options: Any) -> Any:
    tensors, *rest = arguments
    dim = options.get("dim", rest[0] if rest else 0)
    lead: Any = next((each for each in tensors if type(each) is OwnRows), None)
    if lead is None or "out" in options or type(dim) is not int:
        return NotImplemented
    place, dims = lead._place, lead._local.dim()
    dim = dim % (dims + 1 if function is torch.stack else dims)
    if dim == place.dim and function is not torch.stack:
        return NotImplemented
    own = []
    for each in tensors:
        if type(each) is OwnRows and each._place == place and each._local.dim() == dims:
            own.append(_local(each))
        elif type(each) in (Tensor, nn.Parameter) and each.dim() == dims:
            if each.shape[place.dim] != place.outer * place.total:
                return NotImplemented
            own.append(own_part(_weight(each), place))
        else:
            return NotImplemented
    after = place._replace(dim=place.dim + 1) if function is torch.stack and dim <= place.dim else place
    return _new(function(own, dim), after)


# ---- Autograd ----------------------------------------------------------------------------------------------


@_rule(Tensor.register_hook)
def _hooked(function: Any, arguments: Any, options: Any) -> Any:
    value, hook = arguments
    place = value._place
    if value._memory.source is not None:
        return value._memory.source.register_hook(hook)

    def run(grad: Tensor) -> Any:
        made = hook(FromLocal.apply(grad, place))
        return None if made is None else ToLocal.apply(made, place)

    return value._local.register_hook(run)


@_rule(Tensor.retain_grad, Tensor.grad.__get__)  # type: ignore[attr-defined]
def _retained(function: Any, arguments: Any, options: Any) -> Any:
    value = arguments[0]
    if value._memory.source is not None:
        return function(value._memory.source)
    made = function(value._local)
    return made if made is None else FromLocal.apply(made, value._place)


@_rule(torch.autograd.grad)
def _derived(function: Any, arguments: Any, options: Any) -> Any:
    """Gradients of what may be a module's rows, by what may be."""
    outputs, inputs, *rest = arguments
    single = isinstance(inputs, Tensor)
    asked = [inputs] if single else list(inputs)
    outputs, rest, options = tree_map(as_rows, (outputs, rest, options))
    by = [each._memory.source if type(each) is OwnRows and each._memory.source is not None else each for each in asked]
    made = function(outputs, [each._local if type(each) is OwnRows else each for each in by], *rest, **options)
    return tuple(
        FromLocal.apply(grad, each._place) if type(each) is OwnRows and grad is not None else grad
        for each, grad in zip(by, made, strict=True)
    )
