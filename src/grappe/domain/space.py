"""Rules for what looks at neighbours: convolutions, pooling, interpolation, padding; and for normalisations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grappe.domain.cut import Cut, along, bounds, like, named, refused, rule
from grappe.domain.exchange import Convolving, convolved, fetch, normalised, reduced

Several = int | Sequence[int]
CHANNELS = "channels that are cut, or samples without a batch"
POOLING = "pooling with indices, with a last window that is not whole, or with padding that does not count"


def _each(value: Several, number: int) -> list[int]:
    """Returns a value for each of `number` dimensions."""
    values = [value] if isinstance(value, int) else list(value)
    return values * number if len(values) == 1 else values


def _window(inputs: Cut, length: int, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    """Returns, for a window that slides along the cut dimension: what each process wants, its padding, the sizes.

    Args:
        length: of the output.
    """
    sizes, total = inputs.at.domain.in_proportion(inputs.at.sizes, length), inputs.at.total
    reach = [
        (a * stride - padding, (b - 1) * stride - padding + dilation * (kernel - 1) + 1)
        for a, b in itertools.pairwise(bounds(sizes))
    ]
    want = [(min(max(a, 0), total), min(max(b, 0), total)) for a, b in reach]
    (a, b), (first, end) = reach[inputs.at.domain.rank], want[inputs.at.domain.rank]
    before = min(max(-a, 0), b - a)
    return want, (before, b - a - before - (end - first)), sizes


def _convolution(dims: int, transposed: bool) -> Callable[..., Any]:
    def of(
        inputs: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, more: Any
    ) -> Any:
        if not isinstance(inputs, Cut) or isinstance(weight, Cut) or inputs.dim() != dims + 2 or inputs.at.outer > 1:
            raise refused(CHANNELS)
        at, axis = inputs.at, inputs.at.dim - 2
        if axis < 0:
            raise refused(CHANNELS)
        steps, apart = _each(stride, dims), _each(dilation, dims)
        kernel = [*weight.shape[2:]]
        if padding == "same":
            spare = [d * (k - 1) for d, k in zip(apart, kernel, strict=True)]
            if any(each % 2 for each in spare):
                raise refused("padding='same' of a kernel of even size", "pad by F.pad first")
            pads = [each // 2 for each in spare]
        else:
            pads = [0] * dims if padding == "valid" else _each(padding, dims)
        k, s, p, d = (each[axis] for each in (kernel, steps, pads, apart))
        others, extra = [*pads], _each(more, dims)
        others[axis] = 0
        if not transposed:
            length = (at.total + 2 * p - d * (k - 1) - 1) // s + 1
            want, around, sizes = _window(inputs, length, k, s, p, d)
            how = Convolving(arguments=(steps, others, apart, False, extra, groups), padding=around)
        else:
            length = (at.total - 1) * s - 2 * p + d * (k - 1) + extra[axis] + 1
            sizes = at.domain.in_proportion(at.sizes, length)
            places = list(itertools.pairwise(bounds(sizes)))
            # Output row o comes of the inputs i with o = i x stride - padding + dilation x (a row of the kernel).
            want = [
                (max(0, -((d * (k - 1) - a - p) // s)), min(at.total, (b - 1 + p) // s + 1)) for a, b in places
            ]  # fmt: skip
            want = [(min(a, b), b) for a, b in want]
            first = want[at.domain.rank][0] * s - p
            a, b = places[at.domain.rank]
            shown, extra[axis] = (want[at.domain.rank][1] - want[at.domain.rank][0] - 1) * s + d * (k - 1) + 1, 0
            if b - first > shown:
                if b != length or b - first - shown > s - 1:
                    raise refused("a transposed convolution whose kernel is narrower than its stride")
                extra[axis] = b - first - shown
            how = Convolving(arguments=(steps, others, apart, True, extra, groups), crop=(a - first, b - a))
        return like(inputs, convolved(inputs, weight, bias, want, how), sizes=sizes)

    if transposed:

        def run(
            input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
            groups: int = 1, dilation: Any = 1,
        ) -> Any:  # fmt: skip
            return of(input, weight, bias, stride, padding, dilation, groups, output_padding)

    else:

        def run(  # type: ignore[misc]
            input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
            groups: int = 1,
        ) -> Any:  # fmt: skip
            return of(input, weight, bias, stride, padding, dilation, groups, 0)

    return run


for _dims in (1, 2, 3):
    rule(*named(f"conv{_dims}d"))(_convolution(_dims, transposed=False))
    rule(*named(f"conv_transpose{_dims}d"))(_convolution(_dims, transposed=True))

# ---- Pooling -----------------------------------------------------------------------------------------------


def _pooled(inputs: Cut, dims: int, kernel: Several, stride: Any, padding: Several, dilation: Several, ceil: bool,
            filled: float, pool: Callable[..., Tensor]) -> Cut:  # fmt: skip
    """Pools rows that are fetched, and padded with `filled` where the whole image ends."""
    if inputs.dim() != dims + 2 or inputs.at.dim < 2 or inputs.at.outer > 1:
        raise refused(CHANNELS)
    axis = inputs.at.dim - 2
    kernels, pads, apart = _each(kernel, dims), _each(padding, dims), _each(dilation, dims)
    steps = _each(stride, dims) if stride not in (None, (), []) else [*kernels]
    k, s, p, d = (each[axis] for each in (kernels, steps, pads, apart))
    spare = inputs.at.total + 2 * p - d * (k - 1) - 1
    if ceil and spare % s:
        raise refused(POOLING)
    want, (before, after), sizes = _window(inputs, spare // s + 1, k, s, p, d)
    rows = fetch(inputs, want, "halos")
    if before or after:
        rows = F.pad(rows, [0, 0] * (rows.dim() - 1 - inputs.at.dim) + [before, after], value=filled)
    pads[axis] = 0
    return like(inputs, pool(rows, kernels, steps, pads, apart), sizes=sizes)


def _max_pooling(dims: int) -> Callable[..., Any]:
    function = getattr(torch, f"max_pool{dims}d")

    def run(
        input: Cut, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:  # fmt: skip
        if return_indices:
            raise refused(POOLING)
        return _pooled(input, dims, kernel_size, stride, padding, dilation, ceil_mode, -math.inf, function)

    return run


def _average_pooling(dims: int) -> Callable[..., Any]:
    function = getattr(F, f"avg_pool{dims}d")

    def run(
        input: Cut, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: Any = None,
    ) -> Any:  # fmt: skip
        if divisor_override is not None or (not count_include_pad and any(_each(padding, dims))):
            raise refused(POOLING)

        def pool(rows: Tensor, kernels: Any, steps: Any, pads: Any, _: Any) -> Tensor:
            return function(rows, kernels, steps, pads)

        return _pooled(input, dims, kernel_size, stride, padding, 1, ceil_mode, 0.0, pool)

    return run


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
    rule(*named(f"max_pool{_dims}d", f"_max_pool{_dims}d"))(_max_pooling(_dims))
    rule(*named(f"avg_pool{_dims}d"))(_average_pooling(_dims))
    rule(*named(f"adaptive_avg_pool{_dims}d"))(_adaptive_pooling(_dims, largest=False))
    rule(*named(f"adaptive_max_pool{_dims}d", f"_adaptive_max_pool{_dims}d"))(_adaptive_pooling(_dims, largest=True))

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
    scales = [None] * dims if scale_factor is None else _floats(scale_factor, dims)
    lengths = _each(size, dims) if size is not None else []
    if not lengths:
        lengths = [math.floor(n * float(scale or 1)) for n, scale in zip(input.shape[2:], scales, strict=True)]
    length, scale, total = lengths[axis], scales[axis], at.total
    sizes = at.domain.in_proportion(at.sizes, length)
    ratio = 1 / scale if scale is not None and not recompute_scale_factor else total / length
    places = list(itertools.pairwise(bounds(sizes)))
    if linear and align_corners:
        ratio = (total - 1) / max(1, length - 1)

    def sources(first: int, end: int) -> Tensor:
        rows = torch.arange(first, end, dtype=torch.float32)
        if linear:
            return rows * ratio if align_corners else ((rows + 0.5) * ratio - 0.5).clamp_(min=0)
        return (rows + 0.5 * (mode != "nearest")) * torch.tensor(ratio, dtype=torch.float32)

    reach = [sources(a, b) for a, b in places]
    want = [
        (min(int(each[0]), total - 1), min(int(each[-1]) + 1 + linear, total)) for each in reach
    ]  # fmt: skip
    rows = fetch(input, want, "halos")
    lengths[axis] = rows.shape[at.dim]
    if lengths != [*rows.shape[2:]]:
        corners = {"align_corners": align_corners} if linear else {}
        others = None if size is not None or recompute_scale_factor else [s or 1.0 for s in scales]
        if others is not None:
            others[axis] = 1.0
            rows = F.interpolate(rows, scale_factor=others, mode=mode, **corners)
        else:
            rows = F.interpolate(rows, size=lengths, mode=mode, **corners)
    shown = reach[at.domain.rank].clamp(max=total - 1)
    low = shown.long()
    index = (low - want[at.domain.rank][0]).to(rows.device)
    chosen = rows.index_select(at.dim, index)
    if linear:
        share = (shown - low).to(rows.device, rows.dtype).view([-1] + [1] * (rows.dim() - 1 - at.dim))
        above = rows.index_select(at.dim, (index + 1).clamp_(max=rows.shape[at.dim] - 1))
        chosen = chosen + (above - chosen) * share
    return like(input, chosen, sizes=sizes)


def _floats(value: Any, number: int) -> list[float]:
    return [value] * number if isinstance(value, int | float) else list(value)


@rule(*named("pad"))
def _padded(input: Cut, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    at, place = input.at, input.dim() - 1 - input.at.dim
    others = [*pad]
    before, after = others[2 * place : 2 * place + 2] or (0, 0)
    others[2 * place : 2 * place + 2] = [0, 0][: len(others[2 * place : 2 * place + 2])]
    if min(before, after) < 0 or at.outer > 1:
        raise refused("F.pad that takes rows away", "take them away by a slice")
    part = input.local
    if any(others):
        part = F.pad(part, others, mode=mode, value=value) if mode == "constant" else _pad_whole(part, others, mode)
    if not (before or after):
        return like(input, part)
    total, last = at.total, at.domain.size - 1
    edges = {
        "constant": ((0, 0), (0, 0)),
        "circular": ((total - before, total), (0, after)),
        "reflect": ((1, before + 1), (total - 1 - after, total - 1)),
        "replicate": ((0, 1), (total - 1, total)),
    }
    head, tail = (
        fetch(like(input, part), [edge if rank == at_rank else (0, 0) for rank in range(at.domain.size)], "halos")
        for edge, at_rank in zip(edges[mode], (0, last), strict=True)
    )
    sizes = [*at.sizes]
    sizes[0], sizes[last] = sizes[0] + before, sizes[last] + after
    ends = []
    for rows, number, rank in ((head, before, 0), (tail, after, last)):
        if rank != at.domain.rank:
            ends.append(rows.narrow(at.dim, 0, 0))
        elif mode == "constant":
            shape = [*part.shape]
            shape[at.dim] = number
            ends.append(part.new_full(shape, value or 0.0))
        elif mode == "reflect":
            ends.append(rows.flip(at.dim))
        else:
            ends.append(rows.repeat_interleave(number, at.dim) if mode == "replicate" else rows)
    return like(input, torch.cat([ends[0], part, ends[1]], at.dim), sizes=tuple(sizes))


def _pad_whole(part: Tensor, others: Sequence[int], mode: str) -> Tensor:
    """Pads the dimensions that are whole; torch wants a pair for each dimension after the channels."""
    return F.pad(part, [*others, *[0] * (2 * (part.dim() - 2) - len(others))], mode=mode)


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
