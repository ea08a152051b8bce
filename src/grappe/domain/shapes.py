"""Rules for what keeps rows apart: elementwise functions, views, indexing, concatenation, reductions, products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grappe.domain.cut import DIFFERENT, MERGED, Cut, Parting, along, bounds, like, name_of, named, refused, rule
from grappe.domain.exchange import all_sum, fetch, joined_with, realigned, reduced, refetching, separated

# ---- Elementwise -------------------------------------------------------------------------------------------

_ELEMENTWISE = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow neg negative abs absolute "
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan atan2 sinh cosh tanh erf erfc "
    "sigmoid logit relu relu6 leaky_relu gelu silu mish elu selu celu softplus softsign logsigmoid hardswish "
    "hardsigmoid hardtanh tanhshrink threshold sign floor ceil round trunc frac reciprocal clamp clamp_min clamp_max "
    "clip where lerp addcmul addcdiv maximum minimum eq ne lt le gt ge isnan isinf isfinite logical_and logical_or "
    "logical_not logical_xor bitwise_and bitwise_or bitwise_not masked_fill nan_to_num heaviside rad2deg deg2rad "
    "relu_ leaky_relu_ sigmoid_ tanh_ add_ sub_ mul_ div_ neg_ exp_ clamp_ clamp_min_ pow_ masked_fill_ silu_ "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __div__ __rdiv__ __floordiv__ __mod__ __pow__ __rpow__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ "
    "__ge__ __and__ __or__ __xor__ __invert__ to float double half bfloat16 long int bool type type_as contiguous "
    "clone hardtanh_ detach zeros_like ones_like full_like empty_like cpu cuda"
)


def _parts(tensors: Sequence[Any]) -> tuple[list[Any], Cut, int]:
    """Returns the parts of tensors that are broadcast together, the Cut that leads, and its dimension from the end."""
    leader = max((each for each in tensors if isinstance(each, Cut)), key=lambda each: each.dim())
    at, from_end = leader.at, leader.at.dim - leader.dim()

    def part(value: Any) -> Any:
        if isinstance(value, Cut):
            if value.at.dim - value.dim() != from_end or value.at.outer != at.outer or value.at.total != at.total:
                raise refused(DIFFERENT)
            return realigned(value, at.sizes).local
        if isinstance(value, Tensor) and value.dim() >= -from_end and value.shape[from_end] > 1:
            return at.part_of(value, from_end)
        return value

    return [part(value) for value in tensors], leader, from_end


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        names = list(options)
        parts, leader, from_end = _parts([*arguments, *options.values()])
        own = len(arguments)
        output = function(*parts[:own], **dict(zip(names, parts[own:], strict=True)))
        return Cut(output, leader.at._replace(dim=output.dim() + from_end))

    return run


for _function in named(*_ELEMENTWISE.split()):
    rule(_function)(_elementwise(_function))


def _with_reduction(function: Callable[..., Any], values: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of a loss: `values` gives one for each element, and `reduction` comes after."""

    def run(*arguments: Any, reduction: str = "mean", **options: Any) -> Any:
        each = values(function, *arguments, **options)
        return {"none": lambda: each, "sum": each.sum, "mean": each.mean}[reduction]()

    return run


def _loss_of_each(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    options = {key: value for key, value in options.items() if key not in ("size_average", "reduce")}
    return _elementwise(function)(*arguments, **options, reduction="none")


for _function in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.gaussian_nll_loss, F.poisson_nll_loss,
):  # fmt: skip
    rule(_function)(_with_reduction(_function, _loss_of_each))


def _drawn(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(like_this: Cut, *arguments: Any, **options: Any) -> Cut:
        full = torch.empty(like_this.shape, dtype=like_this.dtype, device=like_this.device)
        return like(like_this, like_this.at.part_of(function(full, *arguments, **options), like_this.at.dim))

    return run


for _function in named("rand_like", "randn_like"):
    rule(_function)(_drawn(_function))


def _dropout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Draws one process's numbers for the whole tensor, and keeps this process's part."""

    def run(inputs: Cut, p: float = 0.5, training: bool = True, inplace: bool = False) -> Cut:
        if not training or not p:
            return inputs
        ones = torch.ones(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        return like(inputs, inputs.local * inputs.at.part_of(function(ones, p, True), inputs.at.dim))

    return run


for _function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d):
    rule(_function)(_dropout(_function))


# ---- Views -------------------------------------------------------------------------------------------------


def _sizes(sizes: Sequence[Any]) -> list[int]:
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


@rule(*named("view", "reshape"))
def _reshaped(inputs: Cut, *sizes: Any, **options: Any) -> Any:
    """Finds the new dimension that has the cut one; dimensions before it may be merged with it.

    The elements are `before` x length x `after`, and a process has its places of the length. In the new shape, the
    dimension after `ahead` elements is made of `outer` of the cut ones, and `behind` elements follow.
    """
    shape = _sizes(sizes or (options.get("shape"),))
    if isinstance(shape[0] if shape else 0, torch.dtype):
        raise refused("Tensor.view(dtype)")
    expected = -math.prod(shape) if -1 in shape else 1
    shape = [inputs.numel() // max(1, expected) if size == -1 else size for size in shape]
    at, old = inputs.at, inputs.shape
    before, after = math.prod(old[: at.dim]) * at.outer, math.prod(old[at.dim + 1 :])
    for dim, size in enumerate(shape):
        ahead, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        outer = before // ahead if ahead and before % ahead == 0 else 0
        if not outer or size % outer or size == outer or at.total * after % behind:
            continue
        if any(part * after % behind for part in at.sizes):
            if behind % after or at.outer > 1:
                continue
            rows = behind // after  # patches of several rows: whole ones on each process
            lengths = at.domain.in_proportion(at.sizes, at.total // rows)
            inputs = realigned(inputs, [rows * length for length in lengths])
        new = tuple(part * after // behind for part in inputs.at.sizes)
        shown = [*shape]
        shown[dim] = outer * new[at.domain.rank]
        return Cut(inputs.local.reshape(shown), Parting(at.domain, dim, new, outer))
    raise refused(f"the view of {list(old)} as {list(shape)}")


@rule(*named("view_as", "reshape_as"))
def _reshaped_as(inputs: Any, other: Any) -> Any:
    return inputs.reshape(other.shape)


@rule(*named("flatten"))
def _flattened(inputs: Cut, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % inputs.dim(), end_dim % inputs.dim()
    shape = inputs.shape
    return inputs.reshape([*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


@rule(*named("unflatten"))
def _unflattened(inputs: Cut, dim: int, sizes: Sequence[int]) -> Any:
    dim %= inputs.dim()
    return inputs.reshape([*inputs.shape[:dim], *sizes, *inputs.shape[dim + 1 :]])


@rule(*named("transpose", "swapaxes", "swapdims"))
def _transposed(inputs: Cut, dim0: int, dim1: int) -> Cut:
    order = list(range(inputs.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(inputs, order)


@rule(*named("permute"))
def _permuted(inputs: Cut, *dims: Any, **options: Any) -> Cut:
    order = [dim % inputs.dim() for dim in _sizes(dims or (options["dims"],))]
    return like(inputs, inputs.local.permute(order), dim=order.index(inputs.at.dim))


@rule(*named("t"), *(getattr(each, "__get__") for each in (Tensor.T, Tensor.mT)))  # noqa: B009
def _last_transposed(inputs: Cut) -> Cut:
    return _transposed(inputs, -2, -1) if inputs.dim() > 1 else inputs


@rule(*named("movedim", "moveaxis"))
def _moved(inputs: Cut, source: int, destination: int) -> Cut:
    order = [dim for dim in range(inputs.dim()) if dim != source % inputs.dim()]
    order.insert(destination % inputs.dim(), source % inputs.dim())
    return _permuted(inputs, order)


@rule(*named("unsqueeze"))
def _unsqueezed(inputs: Cut, dim: int) -> Cut:
    dim %= inputs.dim() + 1
    return like(inputs, inputs.local.unsqueeze(dim), dim=inputs.at.dim + (dim <= inputs.at.dim))


@rule(*named("squeeze"))
def _squeezed(inputs: Cut, dim: Any = None) -> Cut:
    asked = range(inputs.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = sorted({each % inputs.dim() for each in asked if inputs.shape[each] == 1}, reverse=True)
    part, at = inputs.local, inputs.at.dim
    for each in gone:
        part = part.squeeze(each)
    return like(inputs, part, dim=at - sum(each < at for each in gone))


@rule(*named("expand"))
def _expanded(inputs: Cut, *sizes: Any) -> Cut:
    shape = _sizes(sizes)
    dim = inputs.at.dim + len(shape) - inputs.dim()
    shape[dim] = inputs.local.shape[inputs.at.dim]
    return like(inputs, inputs.local.expand(shape), dim=dim)


@rule(*named("expand_as"))
def _expanded_as(inputs: Any, other: Any) -> Any:
    return inputs.expand(other.shape)


@rule(*named("repeat"))
def _repeated(inputs: Cut, *sizes: Any) -> Cut:
    times = _sizes(sizes)
    dim = inputs.at.dim + len(times) - inputs.dim()
    if times[dim] != 1:
        raise along("repeat")
    return like(inputs, inputs.local.repeat(times), dim=dim)


# ---- Choosing and joining ----------------------------------------------------------------------------------


def _interval(inputs: Cut, first: int, end: int) -> Any:
    """Returns places `first` to `end` of the cut dimension, cut likewise; one that is shorter than parts is whole."""
    apart = separated(inputs)
    at = apart.at
    first, end = max(0, first), min(end, at.total)
    if (first, end) == (0, at.total):
        return inputs
    if end - first < at.domain.size:
        full = fetch(apart, [(first, end)] * at.domain.size, "chosen rows")
        return full if inputs.at.outer == 1 else full.flatten(inputs.at.dim, inputs.at.dim + 1)
    sizes = at.domain.in_proportion(at.sizes, end - first)
    places = [first + place for place in bounds(sizes)]
    rows = fetch(apart, list(itertools.pairwise(places)), "chosen rows")
    chosen = like(apart, rows, sizes=sizes)
    return chosen if inputs.at.outer == 1 else joined_with(chosen, inputs.at)


@rule(Tensor.__getitem__)
def _indexed(inputs: Any, index: Any) -> Any:
    if not isinstance(inputs, Cut):
        if isinstance(index, Cut) and index.dtype != torch.bool:  # a table, whole on every process
            return like(index, inputs[index.local])
        return _no_index(index)
    index = list(index) if isinstance(index, tuple) else [index]
    places = sum(each is not None and each is not Ellipsis for each in index)
    if Ellipsis not in [each for each in index if not isinstance(each, Tensor)]:
        index.append(Ellipsis)
    dots = next(number for number, each in enumerate(index) if each is Ellipsis)
    index[dots : dots + 1] = [slice(None)] * (inputs.dim() - places)
    dim = 0
    for each in index:
        if each is None:
            inputs = inputs.unsqueeze(dim)
        elif isinstance(each, int):
            inputs = inputs.select(dim, each)
            continue
        elif isinstance(each, slice):
            inputs = _sliced(inputs, dim, each)
        else:
            _no_index(each)
        dim += 1
    return inputs


def _no_index(index: Any) -> Any:
    raise refused("an index that is a tensor or a list", "choose by slices, by numbers, or multiply by a mask")


def _sliced(inputs: Any, dim: int, part: slice) -> Any:
    if not isinstance(inputs, Cut) or dim != inputs.at.dim:
        index = (slice(None),) * dim + (part,)
        return like(inputs, inputs.local[index]) if isinstance(inputs, Cut) else inputs[index]
    first, end, step = part.indices(inputs.shape[dim])
    if step != 1 or (inputs.at.outer > 1 and (first, end) != (0, inputs.shape[dim])):
        raise along("[::step]")
    return _interval(inputs, first, end)


@rule(*named("select"))
def _selected(inputs: Cut, dim: int, index: int) -> Any:
    dim %= inputs.dim()
    at = inputs.at
    if dim != at.dim:
        return like(inputs, inputs.local.select(dim, index), dim=at.dim - (dim < at.dim))
    index %= inputs.shape[dim]
    full = fetch(inputs, [(index, index + 1)] * at.domain.size, "chosen rows")
    return full.squeeze(dim)


@rule(*named("narrow"))
def _narrowed(inputs: Cut, dim: int, start: int, length: int) -> Any:
    return _sliced(inputs, dim % inputs.dim(), slice(start, start + length))


@rule(*named("split"))
def _split(inputs: Cut, split_size: Any, dim: int = 0) -> tuple[Any, ...]:
    dim %= inputs.dim()
    length = inputs.shape[dim]
    sizes = split_size
    if isinstance(split_size, int):
        sizes = [min(split_size, length - first) for first in range(0, length, split_size)]
    return tuple(_sliced(inputs, dim, slice(a, b)) for a, b in itertools.pairwise(bounds(sizes)))


@rule(*named("chunk"))
def _chunks(inputs: Cut, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    return _split(inputs, -(-inputs.shape[dim] // chunks), dim)


@rule(*named("unbind"))
def _unbound(inputs: Cut, dim: int = 0) -> tuple[Any, ...]:
    return tuple(inputs.select(dim, index) for index in range(inputs.shape[dim]))


@rule(*named("cat", "concat", "concatenate"))
def _concatenated(tensors: Sequence[Any], dim: int = 0) -> Cut:
    leader = next(each for each in tensors if isinstance(each, Cut))
    at, dim = leader.at, dim % leader.dim()
    if dim != at.dim:
        parts = [
            realigned(each, at.sizes).local if _is_cut_as(each, at) else at.part_of(_uncut(each), at.dim)
            for each in tensors
        ]
        return like(leader, torch.cat(parts, dim))
    if at.outer > 1 or any(isinstance(each, Cut) and each.at.outer > 1 for each in tensors):
        raise refused(MERGED)
    starts = bounds([each.shape[dim] for each in tensors])
    sizes = at.domain.even(starts[-1])
    places, parts = list(itertools.pairwise(bounds(sizes))), []
    for each, start in zip(tensors, starts[:-1], strict=True):
        length = each.shape[dim]
        want = [(min(max(a - start, 0), length), min(max(b - start, 0), length)) for a, b in places]
        if isinstance(each, Cut):
            parts.append(fetch(each, want, "moved rows"))
        else:  # also where none of it is wanted, so that every process has a gradient for it
            first, end = want[at.domain.rank]
            parts.append(each.narrow(dim, first, end - first))
    return like(leader, torch.cat(parts, dim), sizes=sizes)


def _is_cut_as(value: Any, at: Parting) -> bool:
    return isinstance(value, Cut) and (value.at.dim, value.at.outer, value.at.total) == (at.dim, at.outer, at.total)


def _uncut(value: Any) -> Tensor:
    if isinstance(value, Cut):
        raise refused(DIFFERENT)
    return value


@rule(*named("stack"))
def _stacked(tensors: Sequence[Any], dim: int = 0) -> Any:
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim)


@rule(*named("roll"))
def _rolled(inputs: Any, shifts: Any, dims: Any = None) -> Any:
    for shift, dim in zip(*([each] if isinstance(each, int) else each for each in (shifts, dims)), strict=True):
        if dim is None:
            raise refused("roll")
        if dim % inputs.dim() != inputs.at.dim:
            inputs = like(inputs, inputs.local.roll(shift, dim))
        elif place := -shift % inputs.shape[dim]:
            parts = [_sliced(inputs, inputs.at.dim, part) for part in (slice(place, None), slice(place))]
            inputs = torch.cat(parts, dim)
    return inputs


# ---- Reductions --------------------------------------------------------------------------------------------


def _dims(inputs: Cut, dim: Any) -> list[int]:
    every = dim is None or dim == ()
    return list(range(inputs.dim())) if every else [d % inputs.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def _over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of a function along `dim`, which is not cut; where it drops that, the cut one moves up."""

    def run(inputs: Cut, dim: Any = None, *arguments: Any, **options: Any) -> Any:
        dims = _dims(inputs, dim)
        if inputs.at.dim in dims:
            raise along(name_of(function))
        output = function(inputs.local, dim, *arguments, **options)
        first = output if isinstance(output, Tensor) else output[0]
        kept = first.dim() == inputs.dim()
        at = inputs.at.dim if kept else inputs.at.dim - sum(each < inputs.at.dim for each in dims)
        if isinstance(output, Tensor):
            return like(inputs, output, dim=at)
        return type(output)([like(inputs, each, dim=at) for each in output])

    return run


_ALONG_ROWS = (
    "cumsum cumprod argmax argmin sort argsort max min amax amin aminmax logsumexp std var prod any all softmin glu "
    "cosine_similarity median norm"
)
for _function in named(*_ALONG_ROWS.split()):
    rule(_function)(_over_rows(_function))


@rule(F.normalize)
def _of_length_one(inputs: Cut, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return inputs / (inputs.abs() ** p).sum(dim, keepdim=True).pow(1 / p).clamp_min(eps)


@rule(*named("sum"))
def _sum(inputs: Cut, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = _dims(inputs, dim)
    total = inputs.local.sum(dims, keepdim=keepdim, dtype=dtype)
    if inputs.at.dim in dims:
        return all_sum(total, inputs.at.domain)
    return like(inputs, total, dim=inputs.at.dim - (0 if keepdim else sum(each < inputs.at.dim for each in dims)))


@rule(*named("mean"))
def _mean(inputs: Cut, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _sum(inputs, dim, keepdim, dtype=dtype) / math.prod(inputs.shape[each] for each in _dims(inputs, dim))


def _softmax(inputs: Cut, dim: Any, dtype: Any, logarithm: bool) -> Any:
    at, dim = inputs.at, dim % inputs.dim()
    function = torch.log_softmax if logarithm else torch.softmax
    if dim != at.dim:
        return like(inputs, function(inputs.local, dim, dtype=dtype))
    if at.outer > 1:
        raise refused(MERGED)
    part = inputs.local.to(dtype or inputs.dtype)
    largest = reduced(part.amax(dim, keepdim=True), at.domain, dist.ReduceOp.MAX)
    powers = (part - largest).exp()
    total = all_sum(powers.sum(dim, keepdim=True), at.domain)
    return like(inputs, part - largest - total.log() if logarithm else powers / total)


@rule(*named("softmax"))
def _softmax_rule(inputs: Cut, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax(inputs, dim, dtype, logarithm=False)


@rule(*named("log_softmax"))
def _log_softmax_rule(inputs: Cut, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax(inputs, dim, dtype, logarithm=True)


# ---- Products ----------------------------------------------------------------------------------------------


@rule(F.linear)
def _linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, Cut) or not isinstance(inputs, Cut):
        raise refused("a table or a weight that is cut")
    at = inputs.at
    if at.dim < inputs.dim() - 1:
        return like(inputs, F.linear(inputs.local, weight, bias))
    # Each process has some of the features, as after Flatten: their products are summed, and nothing is gathered.
    total = all_sum(F.linear(inputs.local, at.part_of(weight, 1)), at.domain)
    return total if bias is None else total + bias


@rule(*named("matmul", "bmm", "__matmul__"))
def _product(a: Any, b: Any) -> Any:
    for each in (a, b):
        if each.dim() < 2 or (isinstance(each, Cut) and each.at.outer > 1 and each.at.dim >= each.dim() - 2):
            raise refused(MERGED)
    rows, columns = (each.at.dim - each.dim() if isinstance(each, Cut) else None for each in (a, b))
    if columns in (-1, -2) and rows != -1:  # keys or values: each process takes all of them to its own queries
        if rows != -2:
            raise refused("a table or a weight that is cut")
        every = [(0, b.at.total)] * b.at.domain.size
        return Cut(refetching(torch.matmul, a.local, [(b, every)]), a.at._replace(dim=max(a.dim(), b.dim()) - 2))
    if rows == -1 and columns == -2:
        return all_sum(torch.matmul(a.local, realigned(b, a.at.sizes).local), a.at.domain)
    if rows == -1:
        if isinstance(b, Cut):
            raise refused(DIFFERENT)
        return all_sum(torch.matmul(a.local, a.at.part_of(b, -2)), a.at.domain)
    if rows == -2:
        if isinstance(b, Cut):
            raise refused(DIFFERENT)
        return Cut(torch.matmul(a.local, b), a.at._replace(dim=max(a.dim(), b.dim()) - 2))
    parts, leader, from_end = _parts([a, b])  # in a dimension of the batch
    output = torch.matmul(*parts)
    return Cut(output, leader.at._replace(dim=output.dim() + from_end))


@rule(*named("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "allclose", "equal"))
def _read(*_: Any, **__: Any) -> Any:
    raise refused("reading a tensor's numbers", "compute with tensors, or read what sum() and mean() give")
