"""Rules of convolutions, pooling, interpolation and padding along the dimension of the rows.

Each process computes its part of the output from its rows and those of its neighbours (halos), which it fetches. In
backward the gradients of these go back. Shapes: [samples, channels, *space], the rows in one dimension of space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grappe.rows.context import NOW
from grappe.rows.exchange import Interval, RowExchange, in_proportion, intervals, noted, refused, resized
from grappe.rows.layout import PARTIAL, Placement, TensorLayout
from grappe.rows.plans import RuleCall, Way, along, along_by
from grappe.rows.rules import aten

HALOS = "halos"


def _kind(call: RuleCall) -> tuple[bool, int]:
    """Returns whether pooling takes the largest number, and the dimensions of space."""
    return "max_pool" in call.name, 3 if "3d" in call.name else 2


def _in_space(call: RuleCall) -> Placement | None:
    """Returns the placement of the input's rows in one of the dimensions of space; None: they are elsewhere."""
    if "weight" in call.values:
        return _placed(call["input"], len(call["weight"].shape) - 2)
    return _placed(call["self"], len(call["output_size"]) if "output_size" in call.values else _kind(call)[1])


def _placed(layout: Any, dims: int) -> Placement | None:
    if type(layout) is not TensorLayout or type(layout.placement) is not Placement or len(layout.shape) != dims + 2:
        return None
    return layout.placement if layout.placement.dim >= 2 and layout.placement.outer == 1 else None


def _each(value: Any, number: int) -> list[Any]:
    """Returns a value for each of `number` dimensions."""
    values = [value] if isinstance(value, int | float) else list(value)
    return values * number if len(values) == 1 else values


class Window(NamedTuple):
    """Rows of the input that a process's part of the output is made of."""

    rows: RowExchange
    padding: Interval
    """Rows before and after them, where the whole image ends."""
    at: Placement
    """The placement of the output."""


def _window(at: Placement, length: int, kernel: int, stride: int, padding: int, dilation: int) -> Window:
    """Returns the rows for a window that slides over them; `length` is the output's."""
    sizes = in_proportion(at.sizes, length)
    reach = [
        (a * stride - padding, (b - 1) * stride - padding + dilation * (kernel - 1) + 1) for a, b in intervals(sizes)
    ]
    want = [(min(max(a, 0), at.total), min(max(b, 0), at.total)) for a, b in reach]
    (a, b), (first, end) = reach[NOW.context.rank], want[NOW.context.rank]
    before = min(max(-a, 0), b - a)
    rows = RowExchange(dim=at.dim, sizes=at.sizes, want=tuple(want), purpose=HALOS)
    return Window(rows, (before, b - a - before - (end - first)), at._replace(sizes=sizes))


def _gave_back(window: Window, gradient: Tensor, own: Tensor) -> Tensor:
    """Returns the gradient of an own part, from that of the padded rows."""
    dim, (before, after) = window.rows.dim, window.padding
    asked = gradient.narrow(dim, before, gradient.shape[dim] - before - after)
    return window.rows.give_back(asked, own.shape)


# ---- Convolution -------------------------------------------------------------------------------------------


class _Convolving(NamedTuple):
    window: Window
    arguments: tuple[Any, ...]
    """Arguments of aten's convolution after the bias: stride, padding (0 along the rows), dilation, …"""
    crop: Interval | None = None
    """The first row of the output that is this process's, and their number."""


def _convolving(call: RuleCall, at: Placement) -> _Convolving:
    dims, axis = len(call["input"].shape) - 2, at.dim - 2
    kernel = call["weight"].shape[2:]
    steps, others, spread, extra = (
        _each(call[name], dims) for name in ("stride", "padding", "dilation", "output_padding")
    )
    k, s, p, d = (each[axis] for each in (kernel, steps, others, spread))
    others[axis] = 0
    if not call["transposed"]:
        window = _window(at, (at.total + 2 * p - d * (k - 1) - 1) // s + 1, k, s, p, d)
        return _Convolving(window, (steps, others, spread, False, extra, call["groups"]))
    sizes = in_proportion(at.sizes, (at.total - 1) * s - 2 * p + d * (k - 1) + extra[axis] + 1)
    # Output row o comes of the inputs i with o = i x stride - padding + dilation x (a row of the kernel).
    want = [
        (min(max(0, -((d * (k - 1) - a - p) // s)), end), end)
        for a, b in intervals(sizes)
        for end in [min(at.total, (b - 1 + p) // s + 1)]
    ]
    crops = []
    for rank, ((a, b), (first, end)) in enumerate(zip(intervals(sizes), want, strict=True)):
        begin = a + p - first * s  # in the rows that the convolution of what is fetched gives
        missing = begin + b - a - ((end - first - 1) * s + d * (k - 1) + 1)
        if end <= first or (missing > 0 and (rank < NOW.context.size - 1 or missing >= s)):
            raise refused("a transposed convolution whose kernel is narrower than its stride")
        crops.append((begin, b - a, max(0, missing)))
    begin, number, extra[axis] = crops[NOW.context.rank]
    rows = RowExchange(dim=at.dim, sizes=at.sizes, want=tuple(want), purpose=HALOS)
    arguments = (steps, others, spread, True, extra, call["groups"])
    return _Convolving(Window(rows, (0, 0), at._replace(sizes=sizes)), arguments, (begin, number))


@along_by("convolution", _in_space)
def _convolution(call: RuleCall, at: Placement) -> Way:
    window, arguments, crop = _convolving(call, at)

    def convolved(local: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        # Backward takes the own part and the halos, and puts them together again.
        rows = window.rows.brought(local, window.padding, keeps=True)
        made = aten.convolution(rows, weight, bias, *arguments)
        return made if crop is None else made.narrow(at.dim, *crop)

    return Way(at={"input": at, "weight": None, "bias": None}, operator=convolved, results=window.at)


@along_by("convolution_backward", _in_space)
def _convolution_backward(call: RuleCall, at: Placement) -> Way:
    window, arguments, crop = _convolving(call, at)
    biases, mask = call["bias_sizes"], call["output_mask"]

    def gradients(gradient: Tensor, local: Tensor, weight: Tensor, *_: Any) -> Any:
        rows = window.rows.brought(local, window.padding, keeps=True)
        if crop is not None:
            steps, _, spread, _, extra, _ = arguments
            axis = at.dim - 2
            length = (
                (rows.shape[at.dim] - 1) * steps[axis] + spread[axis] * (weight.shape[at.dim] - 1) + extra[axis] + 1
            )
            every = gradient.new_zeros(resized(gradient.shape, at.dim, length))
            every.narrow(at.dim, *crop).copy_(gradient)
            gradient = every
        of_rows, *others = aten.convolution_backward(gradient, rows, weight, biases, *arguments, mask)
        del rows
        return (None if of_rows is None else _gave_back(window, of_rows, local)), *others

    places = {"grad_output": window.at, "input": at, "weight": None}
    return Way(at=places, operator=gradients, results=(at, PARTIAL, PARTIAL))


# ---- Pooling -----------------------------------------------------------------------------------------------

POOLING = "pooling with a last window that is not whole, or with padding that does not count"


class _Pooling(NamedTuple):
    window: Window
    arguments: tuple[Any, ...]
    """Arguments of torch's operator after the input, for the fetched rows."""
    fill: float


def _pooling(call: RuleCall, at: Placement, largest: bool) -> _Pooling:
    value = call["self"]
    dims, axis = len(value.shape) - 2, at.dim - 2
    kernels, pads = _each(call["kernel_size"], dims), _each(call["padding"], dims)
    steps = _each(call["stride"], dims) if call["stride"] else [*kernels]
    spread = _each(call["dilation"], dims) if largest else [1] * dims
    if not largest and any(pads) and not call["count_include_pad"]:
        raise refused(POOLING)
    k, s, p, d = (each[axis] for each in (kernels, steps, pads, spread))
    left = at.total + 2 * p - d * (k - 1) - 1
    if call["ceil_mode"] and left % s and not largest:
        raise refused(POOLING)
    length = (-(-left // s) if call["ceil_mode"] else left // s) + 1
    length -= (length - 1) * s >= at.total + p  # torch has no window that begins in the padding behind
    window = _window(at, length, k, s, p, d)
    pads[axis] = 0
    rest = (spread, call["ceil_mode"]) if largest else (call["ceil_mode"], True, call["divisor_override"])
    return _Pooling(window, (kernels, steps, pads, *rest), -math.inf if largest else 0.0)


_POOLS = "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d"


@along_by(_POOLS, _in_space)
def _pool(call: RuleCall, at: Placement) -> Way | None:
    largest, _ = _kind(call)
    if not call["self"].dtype.is_floating_point:
        return None
    window, arguments, fill = _pooling(call, at, largest)
    space, operator = call["self"].shape[2:], call.operator

    def pooled(local: Tensor, *_: Any) -> Any:
        rows = window.rows.brought(local, window.padding, fill)
        made = operator(rows, *arguments)
        return (made[0], _of_space(made[1], rows.shape[2:], space, window)) if largest else made

    return Way(operator=pooled, results=(window.at,) * 2 if largest else window.at)


def _of_space(indices: Tensor, own: Sequence[int], every: Sequence[int], window: Window, back: bool = False) -> Tensor:
    """Returns places in the padded rows as places in all of space, or the other way."""
    axis, rank = window.rows.dim - 2, NOW.context.rank
    inner, shift = math.prod(own[axis + 1 :]), window.rows.want[rank][0] - window.padding[0]
    before, after = (every[axis], own[axis]) if back else (own[axis], every[axis])
    shift = -shift if back else shift
    if axis == 0:  # without divisions, which take as long as pooling
        return indices + shift * inner
    return (indices // (before * inner) * after + indices // inner % before + shift) * inner + indices % inner


@along_by(" ".join(f"{name}_backward" for name in _POOLS.split()), _in_space)
def _pool_backward(call: RuleCall, at: Placement) -> Way:
    largest, _ = _kind(call)
    window, arguments, _ = _pooling(call, at, largest)
    space, operator = call["self"].shape[2:], call.operator
    first, end = window.rows.want[NOW.context.rank]
    length = end - first + sum(window.padding)

    def gradient(arriving: Tensor, local: Tensor, *rest: Any) -> Tensor:
        rows = local.new_empty(resized(local.shape, at.dim, length))  # of which the shape alone matters
        chosen = (_of_space(rest[-1], rows.shape[2:], space, window, back=True),) if largest else ()
        return _gave_back(window, operator(arriving, rows, *arguments, *chosen), local)

    places = {"grad_output": window.at, "self": at} | ({"indices": window.at} if largest else {})
    return Way(at=places, operator=gradient, results=at)


_ADAPTIVE = "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d"


@along_by(f"{_ADAPTIVE} {' '.join(f'{name}_backward' for name in _ADAPTIVE.split())}", _in_space)
def _adaptive(call: RuleCall, at: Placement) -> Any:
    """By windows, where they divide the rows."""
    value, is_backward, (largest, dims) = call["self"], call.name.endswith("_backward"), _kind(call)
    lengths = call["grad_output"].shape[2:] if is_backward else call["output_size"]
    if any(have % length for have, length in zip(value.shape[2:], lengths, strict=True)):
        raise refused(f"adaptive pooling of {at.total} rows to {lengths[at.dim - 2]}", "pool to 1, or by windows")
    windows = [have // length for have, length in zip(value.shape[2:], lengths, strict=True)]
    rest = [windows, windows, [0] * dims, *([[1] * dims, False] if largest else [False, True, None])]
    kind = f"{'max' if largest else 'avg'}_pool{dims}d{'_with_indices' * largest}{'_backward' * is_backward}"
    pool = getattr(aten, kind).default

    def run(operator: Any, arguments: Any, options: Any) -> Any:
        return pool(*arguments[: 1 + is_backward], *rest, *(arguments[2:] if is_backward else ()))

    return run


# ---- Interpolation -----------------------------------------------------------------------------------------


class _Interpolating(NamedTuple):
    window: Window
    low: np.ndarray
    """First of the two fetched rows that each own row of the output lies between."""
    share: np.ndarray | None
    """Share of the second one; None: the nearest row is taken."""
    size: list[int]
    """The output's size in all dimensions of space but the rows', which are as many as are fetched."""
    rest: list[Any]
    """Arguments of torch's operator after the sizes."""

    def rows_between(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the rows on either side of own ones of the output, and the shares of the second."""
        low = torch.from_numpy(self.low).to(like.device)
        high = (low + 1).clamp_(max=self.size[self.window.rows.dim - 2] - 1)
        if self.share is None:
            return low, high, None
        shape = [-1] + [1] * (like.dim() - 1 - self.window.rows.dim)
        return low, high, torch.from_numpy(self.share).to(like.device, like.dtype).view(shape)


def _interpolating(call: RuleCall, at: Placement) -> _Interpolating:
    axis, total = at.dim - 2, at.total
    linear, corners = "linear" in call.name, call.values.get("align_corners", False)
    names = [name for name in call.names if name.startswith("scales")]
    scale, length = call[names[axis]], call["output_size"][axis]
    sizes = in_proportion(at.sizes, length)
    ratio = np.float32((total - 1) / max(1, length - 1) if corners else 1 / scale if scale else total / length)

    def sources(first: int, end: int) -> np.ndarray:
        rows = np.arange(first, end, dtype=np.float32)
        if linear:
            return rows * ratio if corners else np.maximum((rows + np.float32(0.5)) * ratio - np.float32(0.5), 0)
        return (rows + np.float32(0.5 * ("exact" in call.name))) * ratio

    reach = [sources(a, b) for a, b in intervals(sizes)]
    want = tuple((min(int(each[0]), total - 1), min(int(each[-1]) + 1 + linear, total)) for each in reach)
    rank = NOW.context.rank
    shown, (first, end) = np.minimum(reach[rank], np.float32(total - 1)), want[rank]
    low = shown.astype(np.int64)
    rows = RowExchange(dim=at.dim, sizes=at.sizes, want=want, purpose=HALOS)
    size = [*call["output_size"]]
    size[axis] = end - first
    scales = [None if name == names[axis] else call[name] for name in names]
    share = shown - low.astype(np.float32) if linear else None
    rest = [corners, *scales] if linear else scales
    return _Interpolating(Window(rows, (0, 0), at._replace(sizes=sizes)), low - first, share, size, rest)


_UPSAMPLES = "upsample_nearest{} _upsample_nearest_exact{}"
UPSAMPLES = (
    f"{' '.join(_UPSAMPLES.format(f'{n}d', f'{n}d') for n in (1, 2, 3))} upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d"
)


@along_by(UPSAMPLES, _in_space)
def _interpolated(call: RuleCall, at: Placement) -> Way:
    """torch interpolates the other dimensions; each row of the output lies between two rows."""
    how, operator = _interpolating(call, at), call.operator

    def interpolated(local: Tensor, *_: Any) -> Tensor:
        rows = how.window.rows.brought(local)
        if how.size != [*rows.shape[2:]]:
            rows = operator(rows, how.size, *how.rest)
        low, high, share = how.rows_between(rows)
        chosen = rows.index_select(at.dim, low)
        return chosen if share is None else chosen.lerp_(rows.index_select(at.dim, high), share)

    return Way(operator=interpolated, results=how.window.at)


@along(" ".join(f"{name}_backward" for name in UPSAMPLES.split()))
def _interpolated_backward(call: RuleCall) -> Way | None:
    gradient, every = call["grad_output"], call["input_size"]
    out = _placed(gradient, len(call["output_size"]))
    if out is None or every[out.dim] < len(out.sizes):
        return None
    at = out._replace(sizes=in_proportion(out.sizes, every[out.dim]))
    how, operator = _interpolating(call, at), call.operator
    length = how.size[at.dim - 2]

    def back(arriving: Tensor, *_: Any) -> Tensor:
        low, high, share = how.rows_between(arriving)
        rows = arriving.new_zeros(resized(arriving.shape, at.dim, length))
        of_high = None if share is None else arriving * share
        rows.index_add_(at.dim, low, arriving if of_high is None else arriving - of_high)
        if of_high is not None:
            rows.index_add_(at.dim, high, of_high)
        before = resized(every, at.dim, length)
        if how.size != before[2:]:
            rows = operator(rows, how.size, before, *how.rest)
        return how.window.rows.give_back(rows, resized(before, at.dim, at.rows))

    return Way(at={"grad_output": how.window.at}, operator=back, results=at)


# ---- Padding -----------------------------------------------------------------------------------------------

_PADS = "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"


@along(f"constant_pad_nd {_PADS} {' '.join(f'{name}_backward' for name in _PADS.split())}")
def _padded(call: RuleCall) -> Way | None:
    """The first process pads before its rows, and the last one after its own; all get as many as that takes."""
    value, name = call["self"], "pad" if "pad" in call.values else "padding"
    at, pad = value.placement, [*call[name]]
    place = 2 * (len(value.shape) - 1 - at.dim) if type(at) is Placement else len(pad)
    if place >= len(pad) or at.outer > 1 or len(at.sizes) < 2:
        return None
    ends, sizes = pad[place : place + 2], [*at.sizes]
    reflects = call.name.startswith("reflection")
    least = [each + 1 if reflects and each > 0 else 1 - min(0, each) for each in ends]
    for end, other in ((0, 1), (-1, -2)):
        sizes[other] -= max(0, least[end] - sizes[end])
        sizes[end] = max(sizes[end], least[end])
    wide = [*sizes]
    wide[0], wide[-1] = wide[0] + ends[0], wide[-1] + ends[1]
    if min(*sizes, *wide) < 1 or sizes[0] < least[0]:
        raise refused(f"padding by {ends[0]} and {ends[1]} rows", "use fewer processes, or larger samples")
    rank = NOW.context.rank
    pad[place : place + 2] = ends[0] * (rank == 0), ends[1] * (rank == len(sizes) - 1)
    taken, padded = at._replace(sizes=tuple(sizes)), at._replace(sizes=noted(tuple(wide)))
    if call.name.endswith("_backward"):
        return Way(at={"grad_output": padded, "self": taken}, constants={name: pad}, results=taken)
    return Way(at={"self": taken}, constants={name: pad}, results=padded)
