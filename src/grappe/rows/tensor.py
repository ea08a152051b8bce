"""Rows: a tensor of the whole batch of which each process holds its own rows, or a term of a sum over processes.

A value is the whole one's (shape, numbers, order), wherever its parts are. A cell says how: `place` is where the rows
are (`Placement`), `PARTIAL` (the value is the sum of the processes' terms) or None (every process has the whole).
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.private_api.torch import tree_leaves, tree_map
from grappe.rows.context import GatheredAt, current


class Placement(NamedTuple):
    """Dimension `dim` is `outer` x (sum of `sizes`), and a process has its own `sizes[rank]` of each of the `outer`."""

    dim: int
    sizes: tuple[int, ...]
    outer: int = 1


PARTIAL = "partial"


def even(rows: int) -> tuple[int, ...]:
    """Rows of each process: as equal as possible, the first ones one more."""
    return tuple(rows // current().size + (rank < rows % current().size) for rank in range(current().size))


class Family:
    """What shares memory with a tensor: `version` counts writes; `origin` is a plain tensor that must see them.
    `terms`: views of a sum of terms; `apart`: one of them was summed, so that a write would not reach the others.
    """

    __slots__ = ("apart", "origin", "terms", "version")

    def __init__(self, origin: Tensor | None = None) -> None:
        self.version, self.origin, self.apart = 0, origin, False
        self.terms: list[weakref.ref[Cell]] = []


class Cell:
    """Where a value is. `ghost`: a view that no part of memory has: (root tensor, functions that make it)."""

    __slots__ = ("__weakref__", "family", "ghost", "local", "place", "seen", "whole")

    def __init__(self, local: Any, place: Any, family: Family | None = None, whole: Any = None, ghost: Any = None):
        self.local, self.place, self.whole, self.ghost = local, place, whole, ghost
        self.family = family if family is not None else Family()
        self.seen = self.family.version


def _global(local: Tensor, place: Any) -> tuple[Any, Any]:
    """Shape and strides of the whole tensor, which lies in memory as its parts do."""
    shape, stride = local.shape, local.stride()
    if type(place) is Placement:
        have, whole = shape[place.dim], place.outer * sum(place.sizes)
        step = stride[place.dim]
        shape = (*shape[: place.dim], whole, *shape[place.dim + 1 :])
        if place.dim or step < max(stride):
            stride = tuple(
                s // have * whole if i != place.dim and s > step and s >= step * have else s
                for i, s in enumerate(stride)
            )
    return shape, stride


class Rows(Tensor):
    _cell: Cell
    __slots__ = ("_cell",)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, cell: Cell, shape: Any = None, stride: Any = None) -> Rows:
        local = cell.local
        if shape is None:
            shape, stride = _global(local, cell.place)
        made = Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=local.dtype, device=local.device)
        made._cell = cell
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        current().dispatched += 1
        rule = RULES.get(function)
        if rule is None:
            rule = RULES[function] = choose(function)
        return rule(function, arguments, options or {})

    # What leaves torch: the whole, on every process.
    def numpy(self, **options: Any) -> Any:
        """The whole, in memory that this tensor has from now on: a write through NumPy is seen, on every process."""
        cell = self._cell
        if type(cell.place) is Placement:
            cell.local, cell.place, cell.family = full(self).clone(), None, Family()
        return full(self).requires_grad_(self.requires_grad).numpy(**options)

    def tolist(self) -> Any:
        return full(self).tolist()

    def __array__(self, *a: Any, **k: Any) -> Any:
        return self.detach().numpy().__array__(*a, **k)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __repr__(self, **_: Any) -> str:
        plain = full(self).detach()
        if self.grad_fn is not None:
            name = self.grad_fn.name()
            return f"{plain!r}"[:-1] + f", grad_fn=<{name.rsplit('::', 1)[-1]}>)"
        return f"{plain.requires_grad_()!r}" if self.requires_grad else f"{plain!r}"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(full(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = full(self).detach().clone()
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = made = self.detach().clone().requires_grad_(self.requires_grad)
        return made


RULES: dict[Any, Any] = {}


# ---- Parts and wholes --------------------------------------------------------------------------------------
def own(tensor: Tensor, place: Placement) -> Tensor:
    """This process's part of a whole plain tensor; a view where it can be."""
    first, n = sum(place.sizes[: current().rank]), place.sizes[current().rank]
    if place.outer == 1:
        return tensor.narrow(place.dim, first, n)
    parts = tensor.unflatten(place.dim, (place.outer, sum(place.sizes)))
    return parts.narrow(place.dim + 1, first, n).flatten(place.dim, place.dim + 1)


def _gather(local: Tensor, place: Placement) -> Tensor:
    n, most, total = place.sizes[current().rank], max(place.sizes), sum(place.sizes)
    rows = local.unflatten(place.dim, (place.outer, n)).movedim(place.dim + 1, 0)
    shape, rows = rows.shape[1:], rows.contiguous()
    width = shape.numel() * rows.element_size()
    sent = rows.new_empty((most, width), dtype=torch.uint8)
    sent[:n] = rows.view(-1).view(torch.uint8).view(n, width)
    parts = [torch.empty_like(sent) for _ in place.sizes]
    dist.all_gather(parts, sent, group=current().group)
    current().sent["gather"] += sent.numel() * (current().size - 1)
    flat = torch.cat([part[:size] for part, size in zip(parts, place.sizes, strict=True)])
    return (
        flat.view(-1).view(local.dtype).view(total, *shape).movedim(0, place.dim + 1).flatten(place.dim, place.dim + 1)
    )


def summed(local: Tensor, operation: Any = None) -> Tensor:
    """The sum over processes (or another operation), a new tensor that is the same on all."""
    wide = local.dtype in (torch.bfloat16, torch.float16, torch.bool)
    total = local.to(torch.int64 if local.dtype is torch.bool else torch.float32) if wide else local.clone()
    total = total.contiguous()
    dist.all_reduce(total, op=dist.ReduceOp.SUM if operation is None else operation, group=current().group)
    current().sent["reduce"] += total.nbytes
    return total.to(local.dtype) if wide else total


def full(value: Any) -> Any:
    """A plain tensor with the value's whole numbers; it must not be written to."""
    if type(value) is not Rows:
        return value
    cell, place = value._cell, value._cell.place
    if cell.ghost is not None and cell.seen != cell.family.version:
        cell.local, cell.seen = _replayed(cell), cell.family.version
    if place is None:
        return cell.local
    if place is PARTIAL:
        cell.local, cell.place, before = summed(cell.local), None, cell.family
        cell.family = Family()
        before.apart = cell.family.apart = any(each() not in (None, cell) for each in before.terms)
        return cell.local
    if cell.whole is not None and cell.seen == cell.family.version:
        if not isinstance(cell.whole, Tensor):
            cell.whole = cell.whole()
        return cell.whole
    got = _gather(cell.local, place)
    if got.stride() != value.stride() and value.numel():
        strided = torch.empty_strided(value.shape, value.stride(), dtype=got.dtype, device=got.device)
        got = strided.copy_(got) if _dense(value) else got
    cell.whole, cell.seen = got, cell.family.version
    return got


def _dense(value: Tensor) -> bool:
    return all(step > 0 or size == 1 for step, size in zip(value.stride(), value.shape, strict=True))


def _replayed(cell: Cell) -> Tensor:
    root, chain = cell.ghost
    made = full(root)
    for function in chain:
        made = function(made)
    return made


def split(plain: Tensor, dim: int = 0, *, shared: bool = False, sizes: tuple[int, ...] | None = None) -> Rows:
    """Returns a plain tensor, equal on all processes, as Rows. `shared`: the script may hold it too."""
    place = Placement(dim, even(plain.shape[dim]) if sizes is None else sizes)
    cell = Cell(own(plain, place), place, Family(plain if shared else None), plain)
    return Rows(cell, plain.shape, plain.stride())


def from_local(local: Tensor, placement: Placement) -> Rows:
    """Returns this process's own rows as a tensor of all rows, which are gathered when they are asked for."""
    return Rows(Cell(local, placement))


def local_rows(value: Any) -> Any:
    """Returns this process's own rows or term, of a tensor of rows; otherwise the value."""
    return value._cell.local if type(value) is Rows else value


def wrap(local: Tensor, place: Any, family: Family | None = None) -> Any:
    """A result: plain if every process has it."""
    if place is None and family is None:
        return local
    return Rows(Cell(local, place, family))


def written(value: Rows) -> Rows:
    """Notes a write to a value's own memory."""
    cell = value._cell
    cell.family.version += 1
    if cell.family.apart:
        raise NotImplementedError("a write to a sum over the batch of which a view was read before")
    if cell.family.origin is not None:
        cell.family.origin.copy_(_gather(cell.local, cell.place) if type(cell.place) is Placement else cell.local)
    return value


def write(value: Rows, new: Tensor) -> None:
    """Writes whole numbers into a value, wherever its memory is."""
    cell = value._cell
    if cell.ghost is not None:
        root, chain = cell.ghost
        base = full(root).clone()
        made = base
        for function in chain:
            made = function(made)
        made.copy_(new)
        write(root, base)
        cell.local, cell.seen = made, cell.family.version
        return
    if type(cell.place) is Placement:
        cell.local.copy_(own(new, cell.place))
    else:
        cell.local.copy_(new)
        cell.place = None
    written(value)


# ---- The default: gather, and compute the whole on every process -------------------------------------------
def note(function: Any) -> None:
    now = current()
    now.gathered[GatheredAt(str(function).removeprefix("aten."), now.line())] += 1


def is_view(function: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)


def gathered(function: Any, arguments: Any, options: Any) -> Any:
    """Runs an operator on wholes. Right for every operator: what it writes goes back to where it was."""
    leaves = [each for each in tree_leaves((arguments, options)) if type(each) is Rows]
    if any(each._cell.place is not None for each in leaves):
        note(function)
    if is_view(function) and not function._schema.is_mutable:
        return _ghosts(function, arguments, options)
    targets = []
    if function._schema.is_mutable:
        named = dict(zip((a.name for a in function._schema.arguments), arguments, strict=False)) | options
        for argument in function._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named:
                targets += [each for each in tree_leaves(named[argument.name]) if type(each) is Rows]
    copies = {id(each): full(each).clone() for each in targets}
    plain = tree_map(
        lambda each: copies.get(id(each), full(each)) if type(each) is Rows else each, (arguments, options)
    )
    result = function(*plain[0], **plain[1])
    for each in targets:
        if each.shape != copies[id(each)].shape:
            raise NotImplementedError(f"{function} changes the size of a tensor of the batch")
        write(each, copies[id(each)])
    if targets:
        back = {id(copies[id(each)]): each for each in targets}
        return tree_map(lambda each: back.get(id(each), each) if isinstance(each, Tensor) else each, result)
    return result


def _ghosts(function: Any, arguments: Any, options: Any) -> Any:
    base = arguments[0]
    cell = base._cell
    rest = tree_map(full, (arguments[1:], options))

    def of(tensor: Tensor, index: int | None = None) -> Any:
        made = function(tensor, *rest[0], **rest[1])
        return made if index is None else made[index]

    root, chain = cell.ghost if cell.ghost is not None else (base.detach(), ())
    made = of(full(base))

    def ghost(tensor: Tensor, index: int | None) -> Rows:
        steps = (*chain, lambda each: of(each, index))
        return Rows(Cell(tensor, None, cell.family, None, (root, steps)))

    return [ghost(each, i) for i, each in enumerate(made)] if isinstance(made, (list, tuple)) else ghost(made, None)


def choose(function: Any) -> Any:
    """The rule of an operator that is called for the first time."""
    from grappe.rows import draws, norms, rules  # noqa: F401

    return rules.of(function)
