"""Exchange: the rows that a process needs of the others' parts, the sums over all, and the backwards of both.

Each process's interval of the cut dimension is brought to it, and what comes back is added where it was from. With it
run convolutions, pooling, attention and whatever else looks at other positions. All functions here are collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grappe.domain.cut import Cut, Domain, Parting, intervals

Interval = tuple[int, int]


def _overlap(a: Interval, b: Interval) -> Interval:
    """Returns the common part of two intervals; an empty one at the begin of `b` without any."""
    first, end = max(a[0], b[0]), min(a[1], b[1])
    return (first, end) if first < end else (b[0], b[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowExchange:
    """The rows of a cut dimension that each process wants, and their ways."""

    domain: Domain
    dim: int
    sizes: tuple[int, ...]
    want: tuple[Interval, ...]
    """By process, an interval of the whole dimension."""
    purpose: str
    """The name under which the bytes are counted."""

    @classmethod
    def of(cls, at: Parting, want: Sequence[Interval], purpose: str) -> RowExchange:
        """Returns the rows of a tensor of `at`, which has one cut dimension by itself."""
        assert at.outer == 1, at
        return cls(domain=at.domain, dim=at.dim, sizes=at.sizes, want=tuple(want), purpose=purpose)

    def _part(self, rank: int) -> Interval:
        return intervals(self.sizes)[rank]

    @property
    def middle(self) -> Interval:
        """Returns where the rows of its own that this process wants are in its part."""
        rank = self.domain.rank
        part = self._part(rank)
        first, end = _overlap(self.want[rank], part)
        return first - part[0], end - part[0]

    @property
    def stays(self) -> bool:
        """Returns whether no process wants a row of another."""
        return all(
            (a >= part[0] and b <= part[1]) or a == b
            for (a, b), part in zip(self.want, intervals(self.sizes), strict=True)
        )

    def _ways(self) -> tuple[dict[int, Interval], dict[int, Interval]]:
        """Returns what goes to each other process, and what comes from it, as intervals of the whole dimension."""
        rank, others = self.domain.rank, [r for r in range(self.domain.size) if r != self.domain.rank]
        give = {r: _overlap(self.want[r], self._part(rank)) for r in others}
        take = {r: _overlap(self.want[rank], self._part(r)) for r in others}
        return ({r: i for r, i in way.items() if i[0] < i[1]} for way in (give, take))  # type: ignore[return-value]

    def bring(self, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows that this process wants: those before its own, its own (a view), those after them."""
        first = self._part(self.domain.rank)[0]
        give, take = self._ways()
        arrived = {r: own.new_empty(_with(own.shape, self.dim, b - a)) for r, (a, b) in take.items()}
        self._send({r: own.narrow(self.dim, a - first, b - a) for r, (a, b) in give.items()}, arrived)
        a, b = self.middle
        empty = own.narrow(self.dim, 0, 0)
        before = [arrived[r] for r in sorted(arrived) if r < self.domain.rank]
        after = [arrived[r] for r in sorted(arrived) if r > self.domain.rank]
        head, tail = (torch.cat(rows, self.dim) if rows else empty for rows in (before, after))
        return head, own.narrow(self.dim, a, b - a), tail

    def give_back(self, asked: Tensor, own_shape: Sequence[int], *, shared: bool = False) -> Tensor:
        """Returns the gradient of `own`, from the gradient of all the rows that this process needing.

        Args:
            shared: whether others may hold `asked`, which otherwise becomes the result where it can.
        """
        rank, first = self.domain.rank, self._part(self.domain.rank)[0]
        begin = self.want[rank][0]
        take, give = self._ways()
        arrived = {r: asked.new_empty(_with(own_shape, self.dim, b - a)) for r, (a, b) in take.items()}
        self._send({r: asked.narrow(self.dim, a - begin, b - a) for r, (a, b) in give.items()}, arrived)
        a, b = self.middle
        inside = asked.narrow(self.dim, first + a - begin, b - a) if b > a else None
        if inside is not None and b - a == own_shape[self.dim]:
            gradient = inside.clone() if arrived and shared else inside
        else:
            gradient = asked.new_zeros(own_shape)
            if inside is not None:
                gradient.narrow(self.dim, a, b - a).add_(inside)
        for r in sorted(arrived):
            a, b = take[r]
            gradient.narrow(self.dim, a - first, b - a).add_(arrived[r])
        return gradient

    def _send(self, to: dict[int, Tensor], arriving: dict[int, Tensor]) -> None:
        group = self.domain.group
        sent = {r: rows.contiguous() for r, rows in to.items()}
        operations = [dist.P2POp(dist.isend, rows, group=group, group_peer=r) for r, rows in sent.items()]
        operations += [dist.P2POp(dist.irecv, rows, group=group, group_peer=r) for r, rows in arriving.items()]
        self.domain.note(self.purpose, [rows.nbytes for rows in sent.values()])
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def _with(shape: Sequence[int], dim: int, size: int) -> list[int]:
    changed = [*shape]
    changed[dim] = size
    return changed


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: RowExchange) -> Tensor:
        ctx.rows, ctx.shape = rows, own.shape
        parts = [part for part in rows.bring(own) if part.shape[rows.dim]] or [own.narrow(rows.dim, 0, 0)]
        return torch.cat(parts, rows.dim) if len(parts) > 1 else parts[0].view_as(parts[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore
        return ctx.rows.give_back(gradient, ctx.shape, shared=True), None


def fetch(cut: Cut, want: Sequence[Interval], purpose: str) -> Tensor:
    """Returns the rows of the cut dimension that this process wants: a tensor with a gradient."""
    rows = RowExchange.of(cut.at, want, purpose)
    if rows.stays:
        first, end = rows.middle
        return cut.local if end - first == cut.local.shape[rows.dim] else cut.local.narrow(rows.dim, first, end - first)
    return _Fetch.apply(cut.local, rows)


def realigned(cut: Cut, sizes: Sequence[int], purpose: str = "moved rows") -> Cut:
    """Returns the same tensor with parts of other sizes."""
    if tuple(sizes) == cut.at.sizes:
        return cut
    apart = separated(cut)
    moved = Cut(fetch(apart, intervals(sizes), purpose), apart.at._replace(sizes=tuple(sizes)))
    return moved if cut.at.outer == 1 else joined_with(moved, cut.at)


def separated(cut: Cut) -> Cut:
    """Returns the tensor with its cut dimension by itself, where others were merged with it."""
    if cut.at.outer == 1:
        return cut
    dim = cut.at.dim
    return Cut(cut.local.unflatten(dim, (cut.at.outer, -1)), cut.at._replace(dim=dim + 1, outer=1))


def joined_with(cut: Cut, at: Parting) -> Cut:
    """Merges the cut dimension with the one before it, as `at` has them: the inverse of `separated`."""
    return Cut(cut.local.flatten(at.dim, at.dim + 1), at._replace(sizes=cut.at.sizes))


def gathered(cut: Cut, purpose: str) -> Tensor:
    """Returns the whole tensor, on every process; each calls it for a purpose that the run's remarks name."""
    apart = separated(cut)
    full = fetch(apart, [(0, apart.at.total)] * apart.at.domain.size, purpose)
    return full if cut.at.outer == 1 else full.flatten(cut.at.dim, cut.at.dim + 1)


# ---- Sums and largest values over the parts -----------------------------------------------------------------


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, domain: Domain) -> Tensor:
        ctx.domain = domain
        return reduced(part, domain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore
        return reduced(gradient, ctx.domain), None


def all_sum(part: Tensor, domain: Domain) -> Tensor:
    """Returns the sum of all processes' `part`: a tensor with a gradient, whole on every process."""
    return _AllSum.apply(part, domain)


def reduced(part: Tensor, domain: Domain, how: Any = dist.ReduceOp.SUM) -> Tensor:
    """Returns the sum (or the largest) of all processes' `part`, without a gradient."""
    total = part.detach().clone(memory_format=torch.contiguous_format)
    domain.note("sums", [total.nbytes])
    dist.all_reduce(total, op=how, group=domain.group)
    return total


# ---- Functions whose fetched rows are not kept for backward -------------------------------------------------


class _Convolution(torch.autograd.Function):
    """A convolution that keeps its own part and the neighbours' rows, and not their copy in one tensor."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, weight: Tensor, bias: Tensor | None, rows: RowExchange, how: Any) -> Tensor:
        head, _, tail = rows.bring(own)
        ctx.rows, ctx.how, ctx.bias = rows, how, None if bias is None else [*bias.shape]
        ctx.save_for_backward(own, head, tail, weight)
        inputs = _Convolution.inputs(ctx, own, head, tail)
        output = torch.ops.aten.convolution(inputs, weight, bias, *how.arguments)
        ctx.length = output.shape[rows.dim]
        return output if how.crop is None else output.narrow(rows.dim, *how.crop).contiguous()

    @staticmethod
    def inputs(ctx: Any, own: Tensor, head: Tensor, tail: Tensor) -> Tensor:
        dim, (before, after), (a, b) = ctx.rows.dim, ctx.how.padding, ctx.rows.middle
        parts = [head, own.narrow(dim, a, b - a), tail]
        if before or after:
            zeros = own.new_zeros(_with(own.shape, dim, max(before, after)))
            parts = [zeros.narrow(dim, 0, before), *parts, zeros.narrow(dim, 0, after)]
        parts = [part for part in parts if part.shape[dim]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore
        own, head, tail, weight = ctx.saved_tensors
        dim, how = ctx.rows.dim, ctx.how
        inputs = _Convolution.inputs(ctx, own, head, tail)
        if how.crop is not None:
            full = gradient.new_zeros(_with(gradient.shape, dim, ctx.length))
            full.narrow(dim, *how.crop).copy_(gradient)
            gradient = full
        needed = [*ctx.needs_input_grad[:3]]
        of_inputs, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, ctx.bias, *how.arguments, needed
        )
        del inputs
        if of_inputs is not None:
            before, after = how.padding
            asked = of_inputs.narrow(dim, before, of_inputs.shape[dim] - before - after)
            of_inputs = ctx.rows.give_back(asked, own.shape)
        return of_inputs, of_weight, of_bias, None, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolving:
    """The arguments of a convolution on fetched rows."""

    arguments: tuple[Any, ...]
    """Of aten's convolution after the bias: stride, padding (0 along the cut dimension), dilation, …"""
    padding: Interval = (0, 0)
    """Rows of zeros before and after the fetched ones, where the whole image ends."""
    crop: Interval | None = None
    """The first row of the output that is this process's, and their number."""


def convolved(cut: Cut, weight: Tensor, bias: Tensor | None, want: Sequence[Interval], how: Convolving) -> Tensor:
    """Returns the convolution of the needing rows."""
    own = cut.local
    if torch.is_autocast_enabled(own.device.type):
        kind = torch.get_autocast_dtype(own.device.type)
        own, weight = own.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    return _Convolution.apply(own, weight, bias, RowExchange.of(cut.at, want, "halos"), how)


class _Refetched(torch.autograd.Function):
    """A function of this process's tensors and of fetched rows, which are fetched again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], several: Sequence[RowExchange], *tensors: Tensor) -> Any:
        ctx.function, ctx.several = function, several
        ctx.save_for_backward(*tensors)
        ctx.lowered = torch.is_autocast_enabled(tensors[0].device.type)
        ctx.kind = torch.get_autocast_dtype(tensors[0].device.type)
        return function(*_joined(several, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore
        tensors = ctx.saved_tensors
        own, rows = tensors[len(ctx.several) :], tensors[: len(ctx.several)]
        inputs = [each.detach() for each in _joined(ctx.several, tensors)]
        lowered = torch.autocast(inputs[0].device.type, dtype=ctx.kind, enabled=ctx.lowered, cache_enabled=False)
        needing = [each for each, needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if needed]
        with torch.enable_grad(), lowered:
            for each in needing:
                each.requires_grad_()
            output = ctx.function(*inputs)
        arriving = iter(torch.autograd.grad(output, needing, gradient))
        del output, inputs, needing
        back = [next(arriving) if needed else None for needed in ctx.needs_input_grad[2:]]
        of_rows = [
            each if each is None else exchange.give_back(each, part.shape)
            for exchange, each, part in zip(ctx.several, back, rows, strict=False)
        ]
        return None, None, *of_rows, *back[len(rows) : len(rows) + len(own)]


def _joined(several: Sequence[RowExchange], tensors: Sequence[Tensor]) -> list[Tensor]:
    fetched = [torch.cat(rows.bring(part), rows.dim) for rows, part in zip(several, tensors, strict=False)]
    return [*fetched, *tensors[len(several) :]]


Asked = Sequence[tuple[Cut, Sequence[Interval]]]


def refetching(function: Callable[..., Tensor], asked: Asked, *own: Tensor) -> Tensor:
    """Returns `function(*rows, *own)`, where `rows` are what each Cut's interval is; they are not kept for backward."""
    several = [RowExchange.of(cut.at, want, "attention") for cut, want in asked]
    return _Refetched.apply(function, several, *(cut.local for cut, _ in asked), *own)


class _Normalised(torch.autograd.Function):
    """(x - mean) / deviation x weight + bias, over dimensions one of which is cut."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, weight: Tensor | None, bias: Tensor | None, dims: list[int], count: int, eps: float,
        domain: Domain,
    ) -> Any:  # fmt: skip
        kind = torch.promote_types(own.dtype, torch.float32)
        mean = reduced(own.sum(dims, keepdim=True, dtype=kind), domain).div_(count)
        variance = reduced((own - mean).square().sum(dims, keepdim=True, dtype=kind), domain).div_(count)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(own, weight, mean, scale)
        ctx.dims, ctx.count, ctx.domain = dims, count, domain
        ctx.bias = None if bias is None else bias.shape
        ctx.mark_non_differentiable(mean, variance)
        normal = (own - mean).mul_(scale if weight is None else scale * weight)
        return (normal if bias is None else normal.add_(bias)).to(own.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:  # pyrefly: ignore
        own, weight, mean, scale = ctx.saved_tensors
        normal = (own - mean).mul_(scale)
        of_weight = None if weight is None else (gradient * normal).sum_to_size(weight.shape)
        of_bias = None if ctx.bias is None else gradient.sum_to_size(ctx.bias)
        weighted = gradient if weight is None else gradient * weight
        sums = torch.stack([each.sum(ctx.dims, keepdim=True) for each in (weighted, weighted * normal)])
        level, slope = reduced(sums, ctx.domain).div_(ctx.count)
        of_own = normal.mul_(-slope).sub_(level).add_(weighted).mul_(scale).to(own.dtype)
        return of_own, of_weight, of_bias, None, None, None, None


def normalised(
    part: Tensor,
    affine: Iterable[Tensor | None],
    dims: list[int],
    count: int,
    eps: float,
    domain: Domain,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `part` normalised over `dims` of all processes' parts, the mean and the (biased) variance.

    Args:
        affine: weight and bias, in shapes that broadcast to the part's.
        count: the numbers that each mean is of.
    """
    return _Normalised.apply(part, *affine, dims, count, eps, domain)
