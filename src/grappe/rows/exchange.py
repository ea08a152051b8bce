"""Exchange: the rows that a process needs of the others' parts of one dimension, and the way back of their gradients.

All functions here are collective.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.errors import PlanError
from grappe.errors.user_line import place_in
from grappe.private_api.torch import tensor_version
from grappe.rows.context import NOW
from grappe.rows.layout import Placement, even

Interval = tuple[int, int]
HALF = (torch.float16, torch.bfloat16)
INSTEAD = (
    "write it with functions that have one, let it work along another dimension, or tell in the task's domain() to cut "
    "another dimension or none"
)


def refused(what: str, instead: str = INSTEAD) -> PlanError:
    """Returns the error for what cannot be done with parts of samples, with the user's line, or that of a library."""
    folder = str(Path(__file__).parent)
    stack = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(folder)]
    return PlanError(f"domain= has no rule for {what} ({place_in(stack)}): {instead}")


# ---- Parts -------------------------------------------------------------------------------------------------


def intervals(sizes: Sequence[int]) -> list[Interval]:
    """Returns the places of each part: the first one, and the one after the last."""
    return list(itertools.pairwise([0, *itertools.accumulate(sizes)]))


def in_proportion(sizes: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the sizes of the parts of a dimension of another length, cut at the same places in proportion."""
    half, total = sum(sizes) // 2, sum(sizes)
    return noted(tuple((b * length + half) // total - (a * length + half) // total for a, b in intervals(sizes)))


def noted(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns sizes of parts, which other dimensions of their length shall have too.

    Raises:
        PlanError: a process would have nothing.
    """
    if min(sizes) < 1:
        raise refused(
            f"a dimension of length {sum(sizes)}, which leaves a process without a part",
            f"use fewer than {len(sizes)} processes, or larger samples",
        )
    NOW.context.lengths[sum(sizes)] = sizes
    return sizes


def sizes_of(length: int) -> tuple[int, ...] | None:
    """Returns sizes of parts for a dimension, those that one of its length had last; None: it is too short."""
    sizes = NOW.context.lengths.get(length) or even(length)
    return sizes if min(sizes) else None


# ---- Rows of others ----------------------------------------------------------------------------------------


def _overlap(a: Interval, b: Interval) -> Interval:
    """Returns the common part of two intervals; an empty one at the begin of `b` without any."""
    first, end = max(a[0], b[0]), min(a[1], b[1])
    return (first, end) if first < end else (b[0], b[0])


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Returns a shape with another size of one dimension."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowExchange:
    """The rows of a dimension that each process wants, and their ways."""

    dim: int
    sizes: tuple[int, ...]
    want: tuple[Interval, ...]
    """By process, an interval of the whole dimension."""
    purpose: str
    """The name under which the bytes are counted."""

    @classmethod
    def to_all(cls, dim: int, sizes: tuple[int, ...], first: int, end: int, purpose: str) -> RowExchange:
        """Returns the exchange that brings one interval to every process."""
        return cls(dim=dim, sizes=sizes, want=((first, end),) * len(sizes), purpose=purpose)

    def _part(self, rank: int) -> Interval:
        return intervals(self.sizes)[rank]

    @property
    def middle(self) -> Interval:
        """Returns where the rows of its own that this process wants are in its part."""
        rank = NOW.context.rank
        part = self._part(rank)
        first, end = _overlap(self.want[rank], part)
        return first - part[0], end - part[0]

    def _ways(self) -> tuple[dict[int, Interval], dict[int, Interval]]:
        """Returns what goes to each other process, and what comes from it, as intervals of the whole dimension."""
        own = NOW.context.rank
        others = [rank for rank in range(len(self.sizes)) if rank != own]
        give = {rank: _overlap(self.want[rank], self._part(own)) for rank in others}
        take = {rank: _overlap(self.want[own], self._part(rank)) for rank in others}
        return ({rank: each for rank, each in way.items() if each[0] < each[1]} for way in (give, take))  # type: ignore[return-value]

    def bring(self, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows that this process wants: those before its own, its own (a view), those after them."""
        rank = NOW.context.rank
        first = self._part(rank)[0]
        give, take = self._ways()
        arrived = {r: own.new_empty(resized(own.shape, self.dim, b - a)) for r, (a, b) in take.items()}
        send({r: own.narrow(self.dim, a - first, b - a) for r, (a, b) in give.items()}, arrived, self.purpose)
        a, b = self.middle
        empty = own.narrow(self.dim, 0, 0)
        before = [arrived[r] for r in sorted(arrived) if r < rank]
        after = [arrived[r] for r in sorted(arrived) if r > rank]
        head, tail = (torch.cat(rows, self.dim) if rows else empty for rows in (before, after))
        return head, own.narrow(self.dim, a, b - a), tail

    def brought(self, own: Tensor, padding: Interval = (0, 0), fill: float = 0.0, *, keeps: bool = False) -> Tensor:
        """Returns the rows that this process wants as one tensor.

        Args:
            padding: rows of `fill` before and after them.
            keeps: whether backward wants them too: the rows of others then stay as long as the own part.
        """
        kept = own.__dict__.setdefault("halos", {}) if keeps else {}
        if (have := kept.get(self)) is not None and have[0] == tensor_version(own):
            head, tail = have[1:]
            middle = own.narrow(self.dim, self.middle[0], self.middle[1] - self.middle[0])
        else:
            head, middle, tail = self.bring(own)
            if torch.is_grad_enabled():
                kept[self] = (tensor_version(own), head, tail)
        filled = own.new_full(resized(own.shape, self.dim, max(padding)), fill)
        parts = [filled.narrow(self.dim, 0, padding[0]), head, middle, tail, filled.narrow(self.dim, 0, padding[1])]
        parts = [part for part in parts if part.shape[self.dim]]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0] if parts else middle

    def give_back(self, asked: Tensor, own_shape: Sequence[int]) -> Tensor:
        """Returns the gradient of `own`, from that of all the rows that this process wants, which it may change."""
        rank = NOW.context.rank
        first, begin = self._part(rank)[0], self.want[rank][0]
        take, give = self._ways()
        arrived = {r: asked.new_empty(resized(own_shape, self.dim, b - a)) for r, (a, b) in take.items()}
        send({r: asked.narrow(self.dim, a - begin, b - a) for r, (a, b) in give.items()}, arrived, self.purpose)
        a, b = self.middle
        inside = asked.narrow(self.dim, first + a - begin, b - a) if b > a else None
        if inside is not None and b - a == own_shape[self.dim]:
            gradient = inside
        else:
            gradient = asked.new_zeros(own_shape)
            if inside is not None:
                gradient.narrow(self.dim, a, b - a).add_(inside)
        total = gradient.float() if arrived and gradient.dtype in HALF else gradient  # rounded once, as a whole sum is
        for r in sorted(arrived):
            a, b = take[r]
            total.narrow(self.dim, a - first, b - a).add_(arrived[r])
        return total.to(gradient.dtype)


def send(to: dict[int, Tensor], arriving: dict[int, Tensor], purpose: str) -> None:
    """Sends tensors to other processes, and waits for those that they send."""
    group = NOW.context.group
    sent = {rank: rows.contiguous() for rank, rows in to.items()}
    operations = [dist.P2POp(dist.isend, rows, group=group, group_peer=rank) for rank, rows in sent.items()]
    operations += [dist.P2POp(dist.irecv, rows, group=group, group_peer=rank) for rank, rows in arriving.items()]
    NOW.context.note(purpose, [rows.nbytes for rows in sent.values()])
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def apart(local: Tensor, placement: Placement) -> tuple[Tensor, int]:
    """Returns an own part with the rows' dimension by itself, where others were merged with it, and that dimension."""
    if placement.outer == 1:
        return local, placement.dim
    return local.unflatten(placement.dim, (placement.outer, -1)), placement.dim + 1


def moved(local: Tensor, placement: Placement, sizes: tuple[int, ...]) -> Tensor:
    """Returns this process's part under other sizes of the parts."""
    rows, dim = apart(local, placement)
    exchange = RowExchange(dim=dim, sizes=placement.sizes, want=tuple(intervals(sizes)), purpose="moved rows")
    made = exchange.brought(rows)
    return made if placement.outer == 1 else made.flatten(dim - 1, dim)


def turned(local: Tensor, before: Placement, at: Placement) -> Tensor:
    """Returns this process's rows of another dimension; both are by themselves."""
    now = NOW.context
    parts = dict(enumerate(intervals(at.sizes)))
    give = {r: local.narrow(at.dim, a, b - a) for r, (a, b) in parts.items() if r != now.rank}
    own = local.narrow(at.dim, parts[now.rank][0], at.rows)
    arrived = {r: local.new_empty(resized(own.shape, before.dim, before.sizes[r])) for r in give}
    send(give, arrived, "moved rows")
    return torch.cat([arrived.get(r, own) for r in range(now.size)], before.dim)


def every_row(local: Tensor, placement: Placement, purpose: str) -> Tensor:
    """Returns all rows, on every process."""
    rows, dim = apart(local, placement)
    made = RowExchange.to_all(dim, placement.sizes, 0, placement.total, purpose).brought(rows)
    return made if placement.outer == 1 else made.flatten(dim - 1, dim)


def scattered(term: Tensor, placement: Placement, purpose: str) -> Tensor:
    """Returns this process's rows of a sum of all processes' terms."""
    rows, dim = apart(term, placement)
    exchange = RowExchange.to_all(dim, placement.sizes, 0, placement.total, purpose)
    made: Any = exchange.give_back(rows, resized(rows.shape, dim, placement.rows))
    return made if placement.outer == 1 else made.flatten(dim - 1, dim)
