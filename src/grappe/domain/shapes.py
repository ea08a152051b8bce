"""Rules for what keeps rows apart: elementwise functions, views, indexing, concatenation, reductions, products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grappe.domain.cut import DIFFERENT, MERGED, Cut, Parting, along, intervals, like, name_of, named, refused, rule
from grappe.domain.exchange import all_sum, fetch, realigned, reduced, refetching
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_unflatten

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
        parts, leader, from_end = _parts([*arguments, *options.values()])
        own = len(arguments)
        output = function(*parts[:own], **dict(zip(options, parts[own:], strict=True)))
        return Cut(output, leader.at._replace(dim=output.dim() + from_end))

    return run


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of a loss with a value for each element, and `reduction` of them."""
    values = _elementwise(function)

    def run(*arguments: Any, reduction: str = "mean", size_average: Any = None, reduce: Any = None, **more: Any) -> Any:
        each = values(*arguments, **more, reduction="none")
        return each if reduction == "none" else getattr(each, reduction)()

    return run


def _drawn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Draws one process's numbers for the whole tensor, and keeps this process's part."""

    def run(inputs: Cut, *arguments: Any, **options: Any) -> Cut:
        full = torch.ones(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        return like(inputs, inputs.at.part_of(function(full, *arguments, **options), inputs.at.dim))

    return run


def _dropout(function: Callable[..., Any]) -> Callable[..., Any]:
    drawn = _drawn(function)
    return lambda inputs, p=0.5, training=True, inplace=False: inputs * drawn(inputs, p) if training and p else inputs


for _of, _functions in (
    (_elementwise, named(*_ELEMENTWISE.split())),
    (_loss, named(
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "gaussian_nll_loss",
        "binary_cross_entropy_with_logits", "poisson_nll_loss",
    )),
    (_drawn, named("rand_like", "randn_like")),
    (_dropout, [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d]),
):  # fmt: skip
    for _function in _functions:
        rule(_function)(_of(_function))


@rule(*named("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "allclose", "equal"))
def _read(*_: Any, **__: Any) -> Any:
    raise refused("reading a tensor's numbers", "compute with tensors, or read what sum() and mean() give")


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


@rule(*named("flatten"))
def _flattened(inputs: Cut, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last, shape = start_dim % inputs.dim(), end_dim % inputs.dim(), inputs.shape
    return inputs.reshape([*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


@rule(*named("unflatten"))
def _unflattened(inputs: Cut, dim: int, sizes: Sequence[int]) -> Any:
    dim %= inputs.dim()
    return inputs.reshape([*inputs.shape[:dim], *sizes, *inputs.shape[dim + 1 :]])


@rule(*named("expand"))
def _expanded(inputs: Cut, *sizes: Any) -> Cut:
    shape = _sizes(sizes)
    dim = inputs.at.dim + len(shape) - inputs.dim()
    shape[dim] = -1
    return like(inputs, inputs.local.expand(shape), dim=dim)


@rule(*named("repeat"))
def _repeated(inputs: Cut, *sizes: Any) -> Cut:
    times = _sizes(sizes)
    dim = inputs.at.dim + len(times) - inputs.dim()
    if times[dim] != 1:
        raise along("repeat")
    return like(inputs, inputs.local.repeat(times), dim=dim)


for _name in ("view_as", "reshape_as", "expand_as"):
    _to = _name.removesuffix("_as")
    rule(*named(_name))(lambda inputs, other, to=_to: getattr(inputs, to)(other.shape))


# ---- Functions of other dimensions than the cut one, and what else is done along that ------------------------------


def _moved(function: Callable[..., Any], inputs: Cut, *arguments: Any, **options: Any) -> Any:
    """Runs a function on the part; the cut dimension is where its outputs are shorter than those of the whole."""
    output = function(inputs.local, *arguments, **options)
    shown = function(torch.empty(inputs.shape, dtype=inputs.dtype, device="meta"), *arguments, **options)
    leaves, nesting = tree_flatten(output)
    dims = [
        [a == b for a, b in zip(part.shape, full.shape, strict=True)].index(False)
        for part, full in zip(leaves, tree_leaves(shown), strict=True)
    ]
    return tree_unflatten([like(inputs, part, dim=dim) for part, dim in zip(leaves, dims, strict=True)], nesting)


def _of_others(
    function: Callable[..., Any], place: int, default: int | None, instead: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Returns the rule of a function that has dimensions as its argument number `place`, each row for itself.

    Args:
        default: of the dimensions; None: all.
        instead: called with the dimensions and all other arguments where the cut one is among them.
    """

    def run(inputs: Any, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(each, Tensor) for each in arguments):  # torch.max(a, b)
            raise refused(f"{name_of(function)} of several tensors")
        if "axis" in options:
            options["dim"] = options.pop("axis")
        dim = arguments[place - 1] if len(arguments) >= place else options.get("dim", default)
        every = dim is None or dim == () or isinstance(dim, bool)
        dims = [each % inputs.dim() for each in (range(inputs.dim()) if every else _sizes((dim,)))]
        if inputs.at.dim not in dims:
            return _moved(function, inputs, *arguments, **options)
        if instead is None:
            raise along(name_of(function))
        others = {key: value for key, value in options.items() if key != "dim"}
        return instead(inputs, dims, *arguments[: place - 1], *arguments[place:], **others)

    return run


def _sum(inputs: Cut, dims: list[int], keepdim: bool = False, *, dtype: Any = None) -> Any:
    return all_sum(inputs.local.sum(dims, keepdim=keepdim, dtype=dtype), inputs.at.domain)


def _mean(inputs: Cut, dims: list[int], keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _sum(inputs, dims, keepdim, dtype=dtype) / math.prod(inputs.shape[each] for each in dims)


def _norm(inputs: Cut, dims: list[int], p: Any = 2, keepdim: bool = False, **_: Any) -> Any:
    power = 2 if p == "fro" else p
    if power not in (1, 2):
        raise along(f"norm with p={p}")
    powers: Any = inputs.abs() ** power
    total = _sum(powers, dims, keepdim)
    return (total.where(total > 0, 1.0) ** (1 / power)).where(total > 0, 0.0)  # its gradient at 0 is 0, as torch's


def _softmax(logarithm: bool) -> Callable[..., Any]:
    def run(inputs: Cut, dims: list[int], *stack_level_and_type: Any, dtype: Any = None, **_: Any) -> Any:
        [dim], at = dims, inputs.at
        if at.outer > 1:
            raise refused(MERGED)
        kind = next((each for each in (dtype, *stack_level_and_type) if isinstance(each, torch.dtype)), inputs.dtype)
        part = inputs.local.to(kind)
        largest = reduced(part.amax(dim, keepdim=True), at.domain, dist.ReduceOp.MAX)
        powers = (part - largest).exp()
        total = all_sum(powers.sum(dim, keepdim=True), at.domain)
        return like(inputs, part - largest - total.log() if logarithm else powers / total)

    return run


def _rows(inputs: Cut, first: int, end: int) -> Any:
    """Returns places `first` to `end` of the cut dimension, cut likewise; one that is shorter than parts is whole."""
    at, length = inputs.at, inputs.shape[inputs.at.dim]
    first, end = max(0, first), min(end, length)
    if (first, end) == (0, length):
        return inputs
    if at.outer > 1:
        raise refused(MERGED)
    if end - first < at.domain.size:
        return fetch(inputs, [(first, end)] * at.domain.size, "chosen rows")
    sizes = at.domain.in_proportion(at.sizes, end - first)
    want = [(first + a, first + b) for a, b in intervals(sizes)]
    return like(inputs, fetch(inputs, want, "chosen rows"), sizes=sizes)


def _narrowed(inputs: Cut, _: list[int], start: int, length: int) -> Any:
    return _rows(inputs, start % inputs.at.total, start % inputs.at.total + length)


def _selected(inputs: Cut, dims: list[int], index: int) -> Any:
    index %= inputs.shape[dims[0]]
    return fetch(inputs, [(index, index + 1)] * inputs.at.domain.size, "chosen rows").squeeze(dims[0])


def _split(inputs: Cut, dims: list[int], size: Any) -> tuple[Any, ...]:
    length = inputs.shape[dims[0]]
    sizes = [min(size, length - first) for first in range(0, length, size)] if isinstance(size, int) else size
    return tuple(_rows(inputs, a, b) for a, b in intervals(sizes))


def _chunks(inputs: Cut, dims: list[int], chunks: int) -> tuple[Any, ...]:
    return _split(inputs, dims, -(-inputs.shape[dims[0]] // chunks))


def _unbound(inputs: Cut, dims: list[int]) -> tuple[Any, ...]:
    return tuple(_selected(inputs, dims, index) for index in range(inputs.shape[dims[0]]))


for _names, _place, _default, _instead in (
    ("sum", 1, None, _sum), ("mean", 1, None, _mean), ("softmax", 1, None, _softmax(False)),
    ("log_softmax", 1, None, _softmax(True)), ("narrow", 1, 0, _narrowed), ("select", 1, 0, _selected),
    ("split", 2, 0, _split), ("chunk", 2, 0, _chunks), ("unbind", 1, 0, _unbound),
    ("cumsum cumprod argmax argmin max min amax amin aminmax logsumexp std var prod any all softmin median", 1, None,
     None),
    ("sort argsort glu", 1, -1, None), ("topk", 2, -1, None), ("norm", 2, None, _norm),
    ("repeat_interleave", 2, None, None),
):  # fmt: skip
    for _function in named(*_names.split()):
        rule(_function)(_of_others(_function, _place, _default, _instead))

for _function in (
    *named("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze", "t"),
    *(getattr(each, "__get__") for each in (Tensor.T, Tensor.mT)),  # noqa: B009
):
    rule(_function)(lambda *arguments, moving=_function, **options: _moved(moving, *arguments, **options))


@rule(*named("squeeze"))
def _squeezed(inputs: Cut, dim: Any = None) -> Cut:
    asked = range(inputs.dim()) if dim is None else _sizes((dim,))
    return _moved(torch.squeeze, inputs, tuple(each for each in asked if inputs.shape[each] == 1))


@rule(Tensor.__getitem__)
def _indexed(inputs: Any, index: Any) -> Any:
    if not isinstance(inputs, Cut) and isinstance(index, Cut) and index.dtype != torch.bool:
        return like(index, inputs[index.local])  # a table, whole on every process
    index = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(inputs, Cut) or not all(
        each is None or isinstance(each, int | slice | type(...)) for each in index
    ):
        raise refused("an index that is a tensor or a list", "choose by slices, by numbers, or multiply by a mask")
    dots = index.index(...) if ... in index else len(index)
    places = sum(each is not None and each is not ... for each in index)
    index[dots : dots + 1] = [slice(None)] * (inputs.dim() - places)
    place = [number for number, each in enumerate(index) if each is not None][inputs.at.dim]
    chosen, index[place] = index[place], slice(None)
    apart = _moved(Tensor.__getitem__, inputs, tuple(index))
    if isinstance(chosen, int):
        return apart.select(apart.at.dim, chosen)
    first, end, step = chosen.indices(inputs.shape[inputs.at.dim])
    if step != 1:
        raise along("[::step]")
    return _rows(apart, first, end)


@rule(*named("cat", "concat", "concatenate"))
def _concatenated(tensors: Sequence[Any], dim: int = 0) -> Cut:
    tensors = [each for each in tensors if each.shape != (0,)]  # torch ignores those, whatever the others' shape
    leader = next(each for each in tensors if isinstance(each, Cut))
    at, dim = leader.at, dim % leader.dim()
    if dim != at.dim:
        return like(leader, torch.cat(_parts(tensors)[0], dim))
    if any(isinstance(each, Cut) and (each.at.dim, each.at.outer) != (dim, 1) for each in tensors):
        raise refused(MERGED)
    starts = intervals([each.shape[dim] for each in tensors])
    sizes = at.domain.even(starts[-1][1])
    parts = []
    for each, (start, end) in zip(tensors, starts, strict=True):
        want = [(min(max(a, start), end) - start, min(max(b, start), end) - start) for a, b in intervals(sizes)]
        if isinstance(each, Cut):
            parts.append(fetch(each, want, "moved rows"))
        else:  # also where none of it is wanted, so that every process has a gradient for it
            a, b = want[at.domain.rank]
            parts.append(each.narrow(dim, a, b - a))
    return like(leader, torch.cat(parts, dim), sizes=sizes)


@rule(*named("stack"))
def _stacked(tensors: Sequence[Any], dim: int = 0) -> Any:
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim)


@rule(*named("roll"))
def _rolled(inputs: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is None:
        raise refused("roll")
    for shift, dim in zip(_sizes((shifts,)), _sizes((dims,)), strict=True):
        place = -shift % inputs.shape[dim]
        if dim % inputs.dim() != inputs.at.dim:
            inputs = like(inputs, inputs.local.roll(shift, dim))
        elif place:
            inputs = torch.cat([_rows(inputs, place, inputs.shape[dim]), _rows(inputs, 0, place)], dim)
    return inputs


# ---- Products ----------------------------------------------------------------------------------------------


@rule(*named("matmul", "bmm", "__matmul__"))
def _product(a: Any, b: Any) -> Any:
    cuts = [each for each in (a, b) if isinstance(each, Cut)]
    if min(a.dim(), b.dim()) < 2:
        raise refused("a product with a vector", "give the vector a second dimension by unsqueeze")
    if len(cuts) == 2 and any(each.at.outer > 1 and each.at.dim >= each.dim() - 2 for each in cuts):
        raise refused(MERGED)
    rows, columns = (each.at.dim - each.dim() if isinstance(each, Cut) else None for each in (a, b))
    last = max(a.dim(), b.dim()) - 1
    if rows is None and columns == -1:
        return Cut(torch.matmul(a, b.local), b.at._replace(dim=last))
    if rows is None and columns == -2:
        return all_sum(torch.matmul(b.at.part_of(a, -1), b.local), b.at.domain)
    if rows == -2 and columns in (-1, -2):  # keys or values: each process takes all of them to its own queries
        every = [(0, b.at.total)] * b.at.domain.size
        return Cut(refetching(lambda fetched, own: own @ fetched, [(b, every)], a.local), a.at._replace(dim=last - 1))
    if rows in (-1, -2) and columns != -2 and isinstance(b, Cut):
        raise refused(DIFFERENT)
    if rows == -1:
        of_rows = realigned(b, a.at.sizes).local if isinstance(b, Cut) else a.at.part_of(b, -2)
        return all_sum(torch.matmul(a.local, of_rows), a.at.domain)
    if rows == -2:
        return Cut(torch.matmul(a.local, b), a.at._replace(dim=last - 1))
    parts, leader, from_end = _parts([a, b])  # in a dimension of the batch
    output = torch.matmul(*parts)
    return Cut(output, leader.at._replace(dim=output.dim() + from_end))


@rule(*named("addmm", "baddbmm"))
def _added_product(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product + (input if beta == 1 else input * beta) if beta else product
