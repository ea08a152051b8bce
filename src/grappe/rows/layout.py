"""Placements of rows in a tensor, and layouts: a tensor's shape, strides, type and placement, each held once."""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.rows.context import NOW


class Placement(NamedTuple):
    """Dimension of the rows: `outer` x (sum of `sizes`), where process r has `sizes[r]` of each `outer`."""

    dim: int
    sizes: tuple[int, ...]
    outer: int = 1

    @property
    def rows(self) -> int:
        """Rows of this process, in each of `outer`."""
        return self.sizes[NOW.context.rank]

    @property
    def total(self) -> int:
        """Rows of all processes, in each of `outer`."""
        return sum(self.sizes)


def even(rows: int) -> tuple[int, ...]:
    """Returns the rows of each process: as equal as possible, the first ones one more."""
    size = NOW.context.size
    return tuple(rows // size + (rank < rows % size) for rank in range(size))


PARTIAL = "partial"
"""The placement of a value that is the sum of the processes' terms."""
GHOST = "ghost"
"""The placement of a view that no process's own memory can show: it is read from, and written through, its base."""

_MOST_LAYOUTS = 20_000  # of scripts whose shapes never repeat
_layouts: dict[Any, TensorLayout] = {}


class TensorLayout:
    """Shape, strides, type and placement of a tensor. Equal layouts are one object, which serves as a key.

    An own part lies in memory as the tensor of all rows would: dimensions in the same order, without their rows.
    Whether a view exists is then the same question for the part and for all rows.
    """

    __slots__ = (
        "code", "device", "dtype", "local_shape", "local_stride", "make", "placement", "shape", "shared", "stride",
    )  # fmt: skip

    def __init__(
        self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, placement: Any, shared: bool
    ) -> None:
        self.shape, self.stride, self.dtype, self.device = shape, stride, dtype, device
        self.placement, self.shared = placement, shared
        self.make = (shape, stride, None, None, dtype, torch.strided, device)
        """Arguments of torch's maker of wrappers."""
        self.local_shape, self.local_stride = shape, stride
        if type(placement) is Placement:
            dim, rows, total = placement.dim, placement.rows, placement.total
            step = stride[dim]
            self.local_shape = torch.Size((*shape[:dim], placement.outer * rows, *shape[dim + 1 :]))
            self.local_stride = tuple(
                each * rows // total
                if step and total and at != dim and each >= step * shape[dim] and size > 1
                else each
                for at, (each, size) in enumerate(zip(stride, shape, strict=True))
            )
        # The same on all processes: it travels with messages.
        self.code = zlib.crc32(f"{tuple(shape)} {dtype} {placement}".encode())

    def __repr__(self) -> str:
        return f"TensorLayout({tuple(self.shape)}, {self.dtype}, {self.placement})"

    def placed(self, placement: Any) -> TensorLayout:
        """Returns the layout with another placement."""
        return layout_of(self.shape, self.stride, self.dtype, self.device, placement)


def layout_of(
    shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, placement: Any = None, shared: bool = False
) -> TensorLayout:
    """Returns the layout object of these properties.

    Args:
        shape: of all rows, as `strides` are.
        shared: whether a plain tensor of the script shares the numbers, so that a write to either is seen by both.
    """
    key = (shape, stride, dtype, device, placement, shared, NOW.context.key)
    layout = _layouts.get(key)
    if layout is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        layout = _layouts[key] = TensorLayout(*key[:-1])
    return layout


def dense_stride(shape: Any, stride: Any) -> tuple[int, ...]:
    """Returns strides without gaps, of dimensions in the same order."""
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim] != 1, -dim))
    dense, step = [0] * len(shape), 1
    for dim in order:
        dense[dim] = step
        step *= max(1, shape[dim])
    return tuple(dense)


def is_dense(tensor: Any) -> bool:
    """Returns whether a tensor, or a layout, has each place of its memory once."""
    stride = tensor.stride() if isinstance(tensor, Tensor) else tensor.stride
    step = 1
    for each, size in sorted((each, size) for each, size in zip(stride, tensor.shape, strict=True) if size > 1):
        if each != step:
            return False
        step *= size
    return True


def overlaps(layout: TensorLayout) -> bool:
    """Returns whether two numbers may have the same place in memory."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(layout.stride, layout.shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def fitted(local: Tensor, layout: TensorLayout) -> Tensor:
    """Returns a new own part as it shall lie in memory; copied if a kernel laid it out otherwise."""
    stride, shape = local.stride(), local.shape
    if stride == layout.local_stride and shape == layout.local_shape:
        return local
    if shape != layout.local_shape:
        raise RuntimeError(f"grappe: a rule made rows of {tuple(shape)} for {layout}: please report it")
    if not math.prod(shape) or all(
        size == 1 or a == b for size, a, b in zip(shape, stride, layout.local_stride, strict=True)
    ):
        return local
    return torch.empty_strided(shape, layout.local_stride, dtype=local.dtype, device=local.device).copy_(local)
