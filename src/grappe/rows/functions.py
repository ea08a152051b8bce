"""Rules of functions within a module: which give own rows of their result for own rows of their arguments."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.private_api.torch import FUNCTION_OWNERS, no_subclass_functions
from grappe.rows.context import NOW
from grappe.rows.draws import fill_own
from grappe.rows.layout import PARTIAL, Placement, layout_of
from grappe.rows.messages import own_part
from grappe.rows.own import FUNCTIONS, FromLocal, OwnRows, ToLocal, local_of, made_view, new_own, own_layout, write_own
from grappe.rows.views import expanded, place_after, reshaped

Rule = Callable[[Any, Any, Any], Any]
"""Rule of a function, with its arguments and options."""
OwnRule = Callable[[Any, OwnRows, list[Any], Any], Any]
"""Rule of a function, with own rows, its further arguments and options."""


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def add(made: Rule) -> Rule:
        for each in functions:
            code = zlib.crc32(getattr(each, "__qualname__", str(each)).encode())
            FUNCTIONS[each] = made, code
        return made

    return add


def _own_rule(*functions: Any) -> Callable[[OwnRule], OwnRule]:
    """Makes a decorator as `_rule`, for functions that are called with own rows first, and without out=."""

    def add(made: OwnRule) -> OwnRule:
        def run(of_torch: Any, arguments: Any, options: Any) -> Any:
            value, *rest = arguments
            if type(value) is not OwnRows or options.get("out") is not None:
                return NotImplemented
            return made(of_torch, value, rest, options)

        _rule(*functions)(run)
        return made

    return add


def _functions(owners: Iterable[Any], names: str) -> list[Any]:
    """Returns the functions of these names, wherever torch has them."""
    every = [getattr(owner, name, None) for owner in owners for name in names.split()]
    return [each for each in every if callable(each)]  # torch.float is a type


def weight(value: Any) -> Any:
    """Returns a tensor that all processes have, whose gradient is the sum of the processes' terms."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    twin = NOW.context.twin(value)
    return ToLocal.apply(value, PARTIAL) if twin is None else twin


def _as_weights(values: Iterable[Any]) -> list[Any] | None:
    """Returns arguments that all processes have; None: one has rows."""
    made = list(values)
    for at, each in enumerate(made):
        kind = type(each)
        if kind is nn.Parameter or kind is Tensor:
            made[at] = weight(each)
        elif isinstance(each, Tensor):
            return None
    return made


def _fitting(values: Iterable[Any], options: Any) -> tuple[list[Any], OwnRows] | None:
    """Returns the own parts of values that are broadcast, and the one of most dimensions; None: they do not fit."""
    every = [each for each in values if type(each) is OwnRows]
    if not every or any(isinstance(each, Tensor) for each in options.values()):
        return None
    lead = max(every, key=lambda each: each._local.dim())
    made = [_aligned_part(each, lead) for each in values]
    return None if any(each is _UNALIKE for each in made) else (made, lead)


_UNALIKE = object()


def _aligned_part(value: Any, lead: OwnRows) -> Any:
    """Returns the part of a value that is broadcast with leading own rows."""
    place, dims, kind = lead._place, lead._local.dim(), type(value)
    if kind is OwnRows:
        own = value._place
        fits = own[1:] == place[1:] and own.dim - value._local.dim() == place.dim - dims
        return local_of(value) if fits else _UNALIKE
    if kind is Tensor or kind is nn.Parameter:
        dim = place.dim - dims + value.dim()
        if value.layout is not torch.strided or (dim >= 0 and value.shape[dim] not in (1, place.outer * place.total)):
            return _UNALIKE
        taken = weight(value)
        return own_part(taken, place._replace(dim=dim)) if dim >= 0 and value.shape[dim] != 1 else taken
    return _UNALIKE if isinstance(value, Tensor) or kind is list or kind is tuple else value


@_rule(
    *_functions(
        FUNCTION_OWNERS,
        "abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max "
        "clamp_min clip copysign cos cosh div divide elu eq erf erfc exp exp2 expm1 floor floor_divide fmod frac ge "
        "gelu greater gt hardsigmoid hardswish hardtanh isfinite isinf isnan ldexp le leaky_relu lerp less log log10 "
        "log1p log2 logaddexp logical_and logical_not logical_or logical_xor logsigmoid log_sigmoid lt masked_fill "
        "maximum minimum mish mul multiply nan_to_num ne neg negative pow prelu reciprocal relu relu6 remainder round "
        "rsqrt rsub selu sigmoid sign silu sin sinh softplus softsign sqrt square sub subtract tan tanh tanhshrink "
        "threshold true_divide trunc xlogy "
        "ones_like zeros_like full_like bool byte double float half bfloat16 int long clone contiguous detach",
    ),
    *_functions(
        (Tensor,),
        "__abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ "
        "__ne__ __neg__ __or__ __pow__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__ "
        "__xor__",
    ),
)
def _pointwise(of_torch: Any, arguments: Any, options: Any) -> Any:
    if options.get("inplace") is True:
        return _write_in_place(of_torch, arguments, options)
    first, second, taken = arguments[0], arguments[-1], None
    if type(first) is OwnRows and len(arguments) < 3 and not options:  # of one tensor, or of two alike: most calls
        kind = type(second)
        if len(arguments) == 1 or kind is float or kind is int:
            taken = [local_of(first), *arguments[1:]], first
        elif kind is OwnRows and second._place == first._place and second._local.dim() == first._local.dim():
            taken = [local_of(first), local_of(second)], first
    if taken is None and "out" not in options:
        taken = _fitting(arguments, options)
    if taken is None:
        return NotImplemented
    values, lead = taken
    made, place = of_torch(*values, **options), lead._place
    if made is NotImplemented:
        return made
    if made is lead._local:
        return lead
    if made.dim() != lead._local.dim():
        place = place._replace(dim=place.dim + made.dim() - lead._local.dim())
    return made_view(lead, made, place) if of_torch in _VIEWS else new_own(made, place)


_VIEWS = {*_functions((torch, Tensor), "detach contiguous bool byte double float half bfloat16 int long to")}
"""Functions whose result may be a view of an argument, or it itself."""


@_rule(*_functions((torch, Tensor), "where"))
def _where(of_torch: Any, arguments: Any, options: Any) -> Any:
    return _pointwise(of_torch, arguments, options) if len(arguments) == 3 else NotImplemented  # of one: places


@_rule(*_functions((Tensor,), "to"))
def _converted(of_torch: Any, arguments: Any, options: Any) -> Any:
    value, *rest = arguments
    if any(isinstance(each, Tensor) for each in (value, *rest, *options.values())[1:]):
        return NotImplemented
    return _pointwise(of_torch, arguments, options)


@_rule(
    *_functions((torch, Tensor), "add_ sub_ mul_ div_ relu_ clamp_ sigmoid_ tanh_ exp_ neg_ masked_fill_ zero_ fill_"),
    *_functions((Tensor,), "__iadd__ __isub__ __imul__ __itruediv__"),
)
def _write_in_place(of_torch: Any, arguments: Any, options: Any) -> Any:
    first = arguments[0]
    taken = _fitting(arguments, options) if type(first) is OwnRows else None
    if taken is None or taken[1]._local.dim() != first._local.dim() or first._memory.is_lent:
        return NotImplemented
    values = taken[0]
    tracked = torch.is_grad_enabled() and any(each.requires_grad for each in values if isinstance(each, Tensor))
    if tracked and first._memory.source is not None:
        return NotImplemented
    write_own(first, lambda: of_torch(*values, **options))
    return first


@_rule(
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse")),
    *_functions((Tensor,), "size dim numel nelement __len__ element_size is_floating_point is_complex"),
    *_functions((torch,), "is_floating_point is_complex numel"),
)
def _property(of_torch: Any, arguments: Any, options: Any) -> Any:
    """Properties of all rows, which the wrapper has."""
    with no_subclass_functions():
        return of_torch(*arguments, **options)


@_rule(Tensor.requires_grad.__get__, Tensor.is_leaf.__get__, Tensor.grad_fn.__get__)  # type: ignore[attr-defined]
def _recorded(of_torch: Any, arguments: Any, options: Any) -> Any:
    source = arguments[0]._memory.source
    return of_torch(arguments[0]._local if source is None else source)


def _bound(names: str, arguments: Any, options: Any) -> list[Any] | None:
    """Returns the arguments by names, None where one is left out; None: there are others."""
    order = names.split(",")
    if len(arguments) > len(order) or not options.keys() <= set(order):
        return None
    return [arguments[at] if at < len(arguments) else options.get(name) for at, name in enumerate(order)]


@_own_rule(*_functions((F,), "linear"), *_functions((torch, Tensor), "matmul __matmul__ bmm mm"))
def _matrix_product(of_torch: Any, value: OwnRows, rest: list[Any], options: Any) -> Any:
    if options:
        return NotImplemented
    other, place, dims = rest[0], value._place, value._local.dim()
    if type(other) is OwnRows or other.dim() > 2:
        taken = _fitting((value, other), options)
        if taken is None or place.dim >= dims - 2 or taken[1]._local.dim() > dims or of_torch is F.linear:
            return NotImplemented
        return new_own(of_torch(*taken[0]), place)
    taken = None if place.dim == dims - 1 else _as_weights(rest)
    return NotImplemented if taken is None else new_own(of_torch(local_of(value), *taken), place)


@_rule(F.scaled_dot_product_attention)
def _dot_product_attention(of_torch: Any, arguments: Any, options: Any) -> Any:
    taken = _bound("query,key,value,attn_mask,dropout_p,is_causal,scale,enable_gqa", arguments, options)
    if taken is None or taken[4] or not all(type(each) is OwnRows for each in taken[:3]):
        return NotImplemented
    parts = _fitting([each for each in taken[:4] if each is not None], {})
    if parts is None or parts[1]._place.dim >= parts[1]._local.dim() - 2:
        return NotImplemented
    own, lead = parts
    mask = own[3] if len(own) == 4 else None
    return new_own(
        of_torch(*own[:3], mask, 0.0, bool(taken[5]), scale=taken[6], enable_gqa=bool(taken[7])), lead._place
    )


def _leaving(functions: Iterable[Any], fits: Callable[[int, int, list[Any], Any], bool]) -> None:
    """Registers functions that leave the rows' dimension in its place; other arguments are what all processes have.

    Args:
        fits: whether they do, of the rows' dimension, the number of dimensions, further arguments and options.
    """

    @_own_rule(*functions)
    def leave(of_torch: Any, value: OwnRows, rest: list[Any], options: Any) -> Any:
        if not fits(value._place.dim, value._local.dim(), rest, options):
            return NotImplemented
        taken, named = _as_weights(rest), _as_weights(options.values())
        if taken is None or named is None:
            return NotImplemented
        made = of_torch(local_of(value), *taken, **dict(zip(options, named, strict=True)))
        return _every_result(made, value._place)


def _every_result(made: Any, place: Placement) -> Any:
    if isinstance(made, Tensor):
        return new_own(made, place)
    return type(made)([new_own(each, place) for each in made])


def _where_absent(names: str, order: str, rest: list[Any], options: Any) -> bool:
    """Returns whether arguments of these names are left out, or False; `order` is that of all after the first."""
    passed = dict(zip(order.split(), rest, strict=False)) | options
    return all(passed.get(name) is None or passed[name] is False for name in names.split())


def _is_batch(dims_of_batch: int, dim: int, dims: int, *_: Any) -> bool:
    return dim == 0 and dims == dims_of_batch


for _count in (1, 2, 3):
    _pools = " ".join(f"{kind}_pool{_count}d" for kind in ("avg", "adaptive_avg", "max", "adaptive_max"))
    _leaving(
        (*_functions((torch,), f"conv{_count}d conv_transpose{_count}d"), *_functions(FUNCTION_OWNERS, _pools)),
        functools.partial(_is_batch, 2 + _count),
    )
_leaving((F.group_norm, F.interpolate), lambda dim, dims, *_: dim == 0 and dims > 2)
_leaving(_functions((torch, F), "pixel_shuffle pixel_unshuffle"), lambda dim, dims, *_: dim < dims - 3)
_leaving(
    _functions((F,), "layer_norm rms_norm"),
    lambda dim, dims, rest, options: dim < dims - len(rest[0] if rest else options["normalized_shape"]),
)
_EMBEDDING = "weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
_leaving(
    (F.embedding,), lambda _, __, *passed: _where_absent("max_norm scale_grad_by_freq sparse", _EMBEDDING, *passed)
)
_BATCH_NORM = "running_mean running_var weight bias training momentum eps"  # in evaluation
_leaving((F.batch_norm,), lambda dim, _, *passed: dim != 1 and _where_absent("training", _BATCH_NORM, *passed))
_leaving((F.pad,), lambda dim, dims, rest, options: dim < dims - len(rest[0] if rest else options["pad"]) // 2)


@_rule(F.dropout)
def _dropout(of_torch: Any, arguments: Any, options: Any) -> Any:
    """Dropout on a CPU, as torch has it: noise of all rows, of which own ones are drawn."""
    taken = _bound("input,p,training,inplace", arguments, options)
    if taken is None or type(taken[0]) is not OwnRows or taken[3]:
        return NotImplemented
    value, p, training, _ = taken
    p, training = 0.5 if p is None else p, training is not False
    if not training or p == 0:
        return value
    local = local_of(value)
    every = own_layout(local.shape, local.stride(), local.dtype, local.device, value._place)
    layout = layout_of(every[0], every[1], local.dtype, local.device, value._place)
    noise = torch.empty_strided(layout.local_shape, layout.local_stride, dtype=local.dtype, device=local.device)
    if not 0 < p < 1 or not fill_own(torch.ops.aten.bernoulli_.float, noise, layout, (1 - p,), {}):
        return NotImplemented
    return new_own(local * noise.div_(1 - p), value._place)


@_own_rule(*_functions((F, torch, Tensor),
                       "softmax log_softmax softmin normalize logsumexp sum mean amax amin max min argmax argmin var "
                       "std norm prod all any cumsum cumprod sort argsort topk glu"))  # fmt: skip
def _along_others(of_torch: Any, value: OwnRows, rest: list[Any], options: Any) -> Any:
    """Functions along other dimensions than the rows'."""
    at = _DIM.get(getattr(of_torch, "__name__", ""), 0)
    dims = options.get("dim", rest[at] if len(rest) > at else None)
    if any(isinstance(each, Tensor) for each in (*rest, *options.values())):
        return NotImplemented
    if type(dims) is int:
        dims = (dims,)
    place, count = value._place, value._local.dim()
    if type(dims) not in (tuple, list) or not dims or any(type(dim) is not int for dim in dims):
        return NotImplemented
    gone = {dim % count for dim in dims}
    if place.dim in gone:
        return NotImplemented
    made = of_torch(local_of(value), *rest, **options)
    results = made if isinstance(made, (tuple, list)) else [made]
    if results[0].dim() != count:
        place = place._replace(dim=place.dim - sum(dim < place.dim for dim in gone))
    return _every_result(made, place)


_DIM = {"normalize": 1, "norm": 1, "topk": 1}
"""Place of the argument `dim` after the tensor, if it is not the first."""


@_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(of_torch: Any, arguments: Any, options: Any) -> Any:
    """Recurrent layers, one by one, with the dropout of all rows between them."""
    value = arguments[0]
    if type(value) is not OwnRows or options or not isinstance(arguments[2], (list, tuple)) or value._local.dim() != 3:
        return NotImplemented  # packed, or no rows
    _, state, weights, bias, number, dropout, training, both, batch_first = arguments
    place = value._place
    at = place._replace(dim=1)
    states = [_part_at(each, at) for each in (state if isinstance(state, (tuple, list)) else (state,))]
    taken = _as_weights(weights)
    if place.dim != 1 - batch_first or any(each is _UNALIKE for each in states) or taken is None:
        return NotImplemented
    ways, each = 2 if both else 1, len(taken) // number
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(number):
        own = [every[layer * ways : (layer + 1) * ways] for every in states]
        made = of_torch(
            local_of(value), tuple(own) if of_torch is torch.lstm else own[0], taken[layer * each : (layer + 1) * each],
            bias, 1, 0.0, training, both, batch_first,
        )  # fmt: skip
        for end, last in zip(ends, made[1:], strict=True):
            end.append(last)
        value = new_own(made[0], place)
        if dropout and training and layer < number - 1:
            value = F.dropout(value, dropout, True)  # type: ignore[assignment]
    return value, *(new_own(torch.cat(end), at) for end in ends)


def _part_at(value: Any, place: Placement) -> Any:
    """Returns this process's part of a value at a placement; _UNALIKE if its rows lie elsewhere."""
    if type(value) is OwnRows:
        return local_of(value) if value._place == place else _UNALIKE
    plain = type(value) is Tensor or type(value) is nn.Parameter
    fits = plain and value.shape[place.dim] == place.outer * place.total
    return own_part(weight(value), place) if fits else _UNALIKE


# ---- Views -------------------------------------------------------------------------------------------------


@_own_rule(Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand)
def _resized(of_torch: Any, value: OwnRows, rest: list[Any], options: Any) -> Any:
    size = tuple(rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest)
    if options or not all(type(each) is int for each in size):
        return NotImplemented
    made = (expanded if of_torch is Tensor.expand else reshaped)(value._local.shape, size, value._place)
    if made is None:
        return NotImplemented
    place, own = made
    return made_view(value, of_torch(local_of(value), own), place)


@_own_rule(Tensor.flatten, torch.flatten)
def _flattened(of_torch: Any, value: OwnRows, rest: list[Any], options: Any) -> Any:
    with no_subclass_functions():
        every = torch.empty(value.shape, device="meta")
    return _resized(Tensor.reshape, value, [of_torch(every, *rest, **options).shape], {})


_BASIC = {int, slice, type(None), type(...)}
"""Types of an index that is a view."""


@_own_rule(
    *_functions((torch, Tensor), "transpose swapaxes permute t unsqueeze squeeze movedim split chunk unbind"),
    *(Tensor.T.__get__, Tensor.mT.__get__, Tensor.__getitem__),  # type: ignore[attr-defined]
)
def _viewed(of_torch: Any, value: OwnRows, rest: list[Any], options: Any) -> Any:
    """Views of all rows: dimensions in another order, or parts of others than the rows'."""
    if of_torch is Tensor.__getitem__:
        index = rest[0] if type(rest[0]) is tuple else rest
        if not all(type(each) in _BASIC for each in index):
            return NotImplemented
    key = of_torch, value._local.shape, value._place, _frozen(rest), _frozen(list(options.items()))
    if key not in _PLACES:
        if len(_PLACES) >= _MOST_PLACES:
            _PLACES.clear()
        _PLACES[key] = place_after(*key[:3], rest, options)
    place = _PLACES[key]
    if place is None:
        return NotImplemented
    made = of_torch(local_of(value), *rest, **options)
    if isinstance(made, Tensor):
        return made_view(value, made, place)
    return type(made)([made_view(value, each, place) for each in made])


def _frozen(value: Any) -> Any:
    """Returns an argument as a part of a key: a list as a tuple, a slice as its type and bounds."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    return (slice, value.start, value.stop, value.step) if type(value) is slice else value


_MOST_PLACES = 5_000  # of a script whose shapes never repeat
_PLACES: dict[Any, Placement | None] = {}
"""Places of rows in a view, by function and arguments."""


@_rule(torch.cat, torch.concat, torch.stack)
def _concatenated(of_torch: Any, arguments: Any, options: Any) -> Any:
    tensors, *rest = arguments
    dim = options.get("dim", rest[0] if rest else 0)
    lead: Any = next((each for each in tensors if type(each) is OwnRows), None)
    if lead is None or "out" in options or type(dim) is not int:
        return NotImplemented
    place, dims = lead._place, lead._local.dim()
    dim = dim % (dims + 1 if of_torch is torch.stack else dims)
    if dim == place.dim and of_torch is not torch.stack:
        return NotImplemented
    own = [_part_at(each, place) for each in tensors]
    if any(each is _UNALIKE for each in own):
        return NotImplemented
    after = place._replace(dim=place.dim + 1) if of_torch is torch.stack and dim <= place.dim else place
    return new_own(of_torch(own, dim), after)


# ---- Autograd ----------------------------------------------------------------------------------------------


@_rule(Tensor.register_hook)
def _hooked(of_torch: Any, arguments: Any, options: Any) -> Any:
    value, hook = arguments
    place = value._place
    if value._memory.source is not None:
        return value._memory.source.register_hook(hook)

    NOW.context.is_watched = True

    def run(grad: Tensor) -> Any:
        made = hook(FromLocal.apply(grad, place))
        return None if made is None else ToLocal.apply(made, place)

    return value._local.register_hook(run)


@_rule(Tensor.retain_grad, Tensor.grad.__get__)  # type: ignore[attr-defined]
def _retained(of_torch: Any, arguments: Any, options: Any) -> Any:
    value = arguments[0]
    if value._memory.source is not None:
        return of_torch(value._memory.source)
    made = of_torch(value._local)
    return made if made is None else FromLocal.apply(made, value._place)
