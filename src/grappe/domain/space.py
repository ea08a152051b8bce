"""Rules for what looks at neighbours: convolutions, pooling, interpolation, padding; and for normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grappe.domain.cut import Cut, along, intervals, like, named, refused, rule
from grappe.domain.exchange import Convolving, convolved, fetch, normalised, reduced

Several = float | Sequence[float]
CHANNELS = "channels that are cut, or samples without a batch"
POOLING = "pooling with indices, with a last window that is not whole, or with padding that does not count"


def _each(value: Several, number: int) -> list[Any]:
    """Returns a value for each of `number` dimensions."""
    values = [value] if isinstance(value, int | float) else list(value)
    return values * number if len(values) == 1 else values


def _window(inputs: Cut, length: int, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    """Returns, for a window that slides along the cut dimension: what each process wants, its padding, the sizes.

    Args:
        length: of the output.
    """
    sizes, total = inputs.at.domain.in_proportion(inputs.at.sizes, length), inputs.at.total
    reach = [
        (a * stride - padding, (b - 1) * stride - padding + dilation * (kernel - 1) + 1) for a, b in intervals(sizes)
    ]
    want = [(min(max(a, 0), total), min(max(b, 0), total)) for a, b in reach]
    (a, b), (first, end) = reach[inputs.at.domain.rank], want[inputs.at.domain.rank]
    before = min(max(-a, 0), b - a)
    return want, (before, b - a - before - (end - first)), sizes


STRAIGHT = ("weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def _convolution(dims: int, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the rule of a convolution, whose arguments after the inputs have these names."""

    def of(
        inputs: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, output_padding: Any = 0,
    ) -> Any:  # fmt: skip
        if not isinstance(inputs, Cut) or isinstance(weight, Cut) or inputs.dim() != dims + 2 or inputs.at.outer > 1:
            raise refused(CHANNELS)
        at, axis = inputs.at, inputs.at.dim - 2
        if axis < 0:
            raise refused(CHANNELS)
        steps, apart, kernel = _each(stride, dims), _each(dilation, dims), [*weight.shape[2:]]
        if padding == "same":
            spare = [d * (k - 1) for d, k in zip(apart, kernel, strict=True)]
            if any(each % 2 for each in spare):
                raise refused("padding='same' of a kernel of even size", "pad by F.pad first")
            padding = [each // 2 for each in spare]
        others, extra = _each(0 if padding == "valid" else padding, dims), _each(output_padding, dims)
        k, s, p, d = (each[axis] for each in (kernel, steps, others, apart))
        others[axis] = 0
        if names is STRAIGHT:
            want, around, sizes = _window(inputs, (at.total + 2 * p - d * (k - 1) - 1) // s + 1, k, s, p, d)
            how = Convolving(arguments=(steps, others, apart, False, extra, groups), padding=around)
            return like(inputs, convolved(inputs, weight, bias, want, how), sizes=sizes)
        length = (at.total - 1) * s - 2 * p + d * (k - 1) + extra[axis] + 1
        sizes = at.domain.in_proportion(at.sizes, length)
        # Output row o comes of the inputs i with o = i x stride - padding + dilation x (a row of the kernel).
        want = [
            (min(max(0, -((d * (k - 1) - a - p) // s)), end), end)
            for a, b in intervals(sizes)
            for end in [min(at.total, (b - 1 + p) // s + 1)]
        ]
        (a, b), (first, end) = intervals(sizes)[at.domain.rank], want[at.domain.rank]
        a, b = a + p - first * s, b + p - first * s  # in the rows that the convolution of what is fetched gives
        missing = b - ((end - first - 1) * s + d * (k - 1) + 1)
        if missing > 0 and (at.domain.rank < at.domain.size - 1 or missing >= s):
            raise refused("a transposed convolution whose kernel is narrower than its stride")
        extra[axis] = max(0, missing)
        how = Convolving(arguments=(steps, others, apart, True, extra, groups), crop=(a, b - a))
        return like(inputs, convolved(inputs, weight, bias, want, how), sizes=sizes)

    return lambda input, *arguments, **options: of(input, **dict(zip(names, arguments, strict=False)), **options)


for _dims in (1, 2, 3):
    rule(*named(f"conv{_dims}d"))(_convolution(_dims, STRAIGHT))
    rule(*named(f"conv_transpose{_dims}d"))(_convolution(_dims, TRANSPOSED))

# ---- Pooling -----------------------------------------------------------------------------------------------


def _pooling(dims: int, largest: bool) -> Callable[..., Any]:
    function = getattr(torch if largest else F, f"{'max' if largest else 'avg'}_pool{dims}d")

    def of(
        inputs: Cut, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
        return_indices: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
    ) -> Any:  # fmt: skip
        """Pools rows that are fetched, and padded where the whole image ends."""
        if inputs.dim() != dims + 2 or inputs.at.dim < 2 or inputs.at.outer > 1:
            raise refused(CHANNELS)
        axis = inputs.at.dim - 2
        kernels, pads, apart = _each(kernel_size, dims), _each(padding, dims), _each(dilation, dims)
        if return_indices or divisor_override is not None or (any(pads) and not count_include_pad):
            raise refused(POOLING)
        steps = _each(stride, dims) if stride not in (None, (), []) else [*kernels]
        k, s, p, d = (each[axis] for each in (kernels, steps, pads, apart))
        spare = inputs.at.total + 2 * p - d * (k - 1) - 1
        if ceil_mode and spare % s and not largest:
            raise refused(POOLING)
        length = (-(-spare // s) if ceil_mode else spare // s) + 1
        length -= (length - 1) * s >= inputs.at.total + p  # torch has no window that begins in the padding behind
        want, (before, after), sizes = _window(inputs, length, k, s, p, d)
        rows = fetch(inputs, want, "halos")
        if before or after:
            filled = -math.inf if largest else 0.0
            rows = F.pad(rows, [0, 0] * (rows.dim() - 1 - inputs.at.dim) + [before, after], value=filled)
        pads[axis] = 0
        dilated = {"dilation": apart} if largest else {}
        return like(inputs, function(rows, kernels, steps, pads, ceil_mode=ceil_mode, **dilated), sizes=sizes)

    names = ("kernel_size", "stride", "padding", *(("dilation", "ceil_mode", "return_indices") if largest else
             ("ceil_mode", "count_include_pad", "divisor_override")))  # fmt: skip
    return lambda input, *arguments, **options: of(input, **dict(zip(names, arguments, strict=False)), **options)


def _adaptive_pooling(dims: int, largest: bool) -> Callable[..., Any]:
    function = getattr(F, f"adaptive_{'max' if largest else 'avg'}_pool{dims}d")
    of_windows = getattr(F, f"{'max' if largest else 'avg'}_pool{dims}d")

    def run(input: Cut, output_size: Any, return_indices: bool = False) -> Any:
        asked, axis = _each(output_size, dims), input.at.dim - 2
        if return_indices or axis < 0 or input.dim() != dims + 2:
            raise refused(POOLING)
        asked = [size or have for size, have in zip(asked, input.shape[2:], strict=True)]
        length, shown = asked[axis], [*asked]
        shown[axis] = input.local.shape[input.at.dim]
        part = like(input, function(input.local, shown)) if shown != [*input.local.shape[2:]] else input
        if length == input.at.total:
            return part
        if length == 1 and not largest:
            return part.mean(input.at.dim, keepdim=True)
        if length == 1 and not torch.is_grad_enabled():
            return reduced(part.local.amax(input.at.dim, keepdim=True), input.at.domain, dist.ReduceOp.MAX)
        if input.at.total % length or length < input.at.domain.size:
            raise refused(f"adaptive pooling of {input.at.total} rows to {length}", "pool to 1, or by windows")
        windows = [1] * dims
        windows[axis] = input.at.total // length
        return of_windows(part, windows)

    return run


for _dims in (1, 2, 3):
    for _kind in ("max", "avg"):
        rule(*named(f"{_kind}_pool{_dims}d", f"_{_kind}_pool{_dims}d"))(_pooling(_dims, _kind == "max"))
        _names = f"adaptive_{_kind}_pool{_dims}d", f"_adaptive_{_kind}_pool{_dims}d"
        rule(*named(*_names))(_adaptive_pooling(_dims, _kind == "max"))

# ---- Interpolation and padding -----------------------------------------------------------------------------


@rule(F.interpolate)
def _interpolated(
    input: Cut, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None,
    recompute_scale_factor: Any = None, antialias: bool = False,
) -> Any:  # fmt: skip
    """Interpolates the whole dimensions by torch, and the cut one by the two rows that each place lies between."""
    dims, axis, at = input.dim() - 2, input.at.dim - 2, input.at
    linear = mode in ("linear", "bilinear", "trilinear")
    if (not linear and mode not in ("nearest", "nearest-exact")) or antialias or axis < 0 or at.outer > 1:
        raise refused(f"F.interpolate with mode={mode}", "use bilinear or nearest, without antialias")
    scales = [None] * dims if scale_factor is None else _each(scale_factor, dims)
    lengths = _each(size, dims) if size is not None else []
    if not lengths:
        lengths = [math.floor(n * float(scale or 1)) for n, scale in zip(input.shape[2:], scales, strict=True)]
    length, scale, total = lengths[axis], scales[axis], at.total
    sizes = at.domain.in_proportion(at.sizes, length)
    ratio = 1 / scale if scale is not None and not recompute_scale_factor else total / length
    places = intervals(sizes)
    if linear and align_corners:
        ratio = (total - 1) / max(1, length - 1)
    ratio = np.float32(ratio)

    def sources(first: int, end: int) -> np.ndarray:
        rows = np.arange(first, end, dtype=np.float32)
        if linear:
            return rows * ratio if align_corners else np.maximum((rows + np.float32(0.5)) * ratio - np.float32(0.5), 0)
        return (rows + np.float32(0.5 * (mode != "nearest"))) * ratio

    reach = [sources(a, b) for a, b in places]
    want = [(min(int(each[0]), total - 1), min(int(each[-1]) + 1 + linear, total)) for each in reach]
    rows = fetch(input, want, "halos")
    lengths[axis] = rows.shape[at.dim]
    if lengths != [*rows.shape[2:]]:
        how: dict[str, Any] = {"align_corners": align_corners} if linear else {}
        if size is not None or recompute_scale_factor:
            how["size"] = lengths
        else:
            how["scale_factor"] = [1.0 if dim == axis else each or 1.0 for dim, each in enumerate(scales)]
        rows = F.interpolate(rows, mode=mode, **how)
    shown = np.minimum(reach[at.domain.rank], np.float32(total - 1))
    low = shown.astype(np.int64)
    index = torch.from_numpy(low - want[at.domain.rank][0]).to(rows.device)
    chosen = rows.index_select(at.dim, index)
    if linear:
        share = torch.from_numpy(shown - low.astype(np.float32)).to(rows.device, rows.dtype)
        share = share.view([-1] + [1] * (rows.dim() - 1 - at.dim))
        above = rows.index_select(at.dim, (index + 1).clamp_(max=rows.shape[at.dim] - 1))
        chosen = chosen + (above - chosen) * share
    return like(input, chosen, sizes=sizes)


@rule(*named("pad"))
def _padded(input: Cut, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    at, place = input.at, 2 * (input.dim() - 1 - input.at.dim)
    # torch wants a pair for each dimension after the channels, unless it pads with a number.
    others = [*pad, *[0] * (2 * (input.dim() - 2 * (mode != "constant")) - len(pad))]
    before, after = others[place : place + 2]
    others[place : place + 2] = [0, 0]
    if min(before, after) < 0 or at.outer > 1:
        raise refused("F.pad that takes rows away", "take them away by a slice")
    part = like(input, F.pad(input.local, others, mode=mode, value=value)) if any(others) else input
    if not (before or after):
        return part

    def rows(first: int, number: int) -> Tensor:
        return fetch(part, [(first, first + number)] * at.domain.size, "halos")

    def filled(number: int) -> Tensor:
        shape = [*part.local.shape]
        shape[at.dim] = number
        return part.local.new_full(shape, value or 0.0)

    last = at.total - 1
    ends: dict[str, Callable[[], list[Tensor]]] = {
        "constant": lambda: [filled(before), filled(after)],
        "circular": lambda: [rows(at.total - before, before), rows(0, after)],
        "reflect": lambda: [rows(1, before).flip(at.dim), rows(last - after, after).flip(at.dim)],
        "replicate": lambda: [
            rows(each, 1).repeat_interleave(number, at.dim) for each, number in ((0, before), (last, after))
        ],
    }
    head, tail = ends[mode]()
    return torch.cat([head, part, tail], at.dim)


# ---- Normalisations ----------------------------------------------------------------------------------------


def _channels(value: Any, dims: int) -> Any:
    return None if value is None else value.view([1, -1] + [1] * (dims - 2))


def _of_space(inputs: Cut, weight: Any, bias: Any, dims: list[int], eps: float) -> tuple[Cut, Tensor, Tensor, int]:
    if inputs.at.outer > 1 or inputs.at.dim not in dims:
        raise refused(CHANNELS)
    count = math.prod(inputs.shape[dim] for dim in dims)
    spread = (_channels(weight, inputs.dim()), _channels(bias, inputs.dim()))
    part, mean, variance = normalised(inputs.local, spread, dims, count, eps, inputs.at.domain)
    return like(inputs, part), mean, variance, count


@rule(*named("batch_norm"))
def _batch_norm(
    input: Cut, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    if not training:
        return like(input, F.batch_norm(input.local, running_mean, running_var, weight, bias, False, momentum, eps))
    dims = [0, *range(2, input.dim())]
    output, mean, variance, count = _of_space(input, weight, bias, dims, eps)
    if running_mean is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((variance.flatten() * (count / (count - 1))).to(running_var.dtype), momentum)
    return output


@rule(*named("instance_norm"))
def _instance_norm(
    input: Cut, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    if running_mean is not None or not use_input_stats:
        raise refused("instance normalisation with running statistics")
    return _of_space(input, weight, bias, list(range(2, input.dim())), eps)[0]


@rule(*named("group_norm"))
def _group_norm(input: Cut, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    if input.at.dim < 2 or input.at.outer > 1:
        raise refused(CHANNELS)
    grouped = input.local.unflatten(1, (num_groups, -1))
    dims = list(range(2, grouped.dim()))
    shape = [1, num_groups, -1] + [1] * (grouped.dim() - 3)
    spread = tuple(None if value is None else value.view(shape) for value in (weight, bias))
    count = math.prod(input.shape[1:]) // num_groups
    part, _mean, _variance = normalised(grouped, spread, dims, count, eps, input.at.domain)
    return like(input, part.flatten(1, 2))


@rule(*named("layer_norm"))
def _layer_norm(
    input: Cut, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    first = input.dim() - len(normalized_shape)
    if input.at.dim < first:
        return like(input, F.layer_norm(input.local, normalized_shape, weight, bias, eps))
    spread = tuple(v if v is None else input.at.part_of(v, input.at.dim - first) for v in (weight, bias))
    dims, count = list(range(first, input.dim())), math.prod(normalized_shape)
    return like(input, normalised(input.local, spread, dims, count, eps, input.at.domain)[0])


@rule(*named("rms_norm"))
def _rms_norm(input: Cut, normalized_shape: Sequence[int], weight: Any = None, eps: Any = None) -> Any:
    if input.at.dim >= input.dim() - len(normalized_shape):
        raise along("rms_norm")
    return like(input, F.rms_norm(input.local, normalized_shape, weight, eps))
