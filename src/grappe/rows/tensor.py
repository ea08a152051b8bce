"""Rows: a tensor of all rows of a batch, of which each process holds its own, or a term of a sum over processes.

Shape, strides and numbers are those of all rows, wherever the parts are. It lies below autograd: derivatives are
torch's own formulas, whose operators come here again. What every process has is a plain tensor, so that parameters,
optimizers and Python run as ever.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import (
    fake_tensor_type,
    in_backward,
    no_torch_function,
    resolve_bits,
    tensor_version,
    throw_on_pointer,
    tree_leaves,
    tree_map,
    wrapper_maker,
)  # fmt: skip
from grappe.rows.context import NOW
from grappe.rows.exchange import apart, moved, refused, resized, turned
from grappe.rows.layout import GHOST, PARTIAL, Placement, TensorLayout, dense_stride, even, fitted, is_dense, layout_of
from grappe.rows.messages import gather, own_part, summed

__all__ = ["GHOST", "PARTIAL", "Placement", "Rows", "from_local", "full", "local_rows", "split"]


class Family:
    """State that the views of one memory share."""

    version = 0
    """Writes so far."""
    cells = 1
    """Tensors that were made of this memory."""
    numbers = 0
    """Elements of the tensor that the memory was made for."""
    origin: Tensor | None = None
    """A plain tensor of the script with the same numbers; writes to it and to the rows are carried over."""
    origin_version = 0
    base: Any = None
    """The cell that was split from `origin`."""
    borrowed: Tensor | None = None
    """All rows, in whose memory the own part lies, if nobody else has them."""
    copied: tuple[Family, int] | None = None
    """The memory, and its version, that these rows of a view were copied from, as parts lie elsewhere there."""
    root: Tensor | None = None
    """All of a process's memory, if it is terms of a sum."""
    lent: Any = None
    """The memory of a module's rows, which these are."""

    def __init__(self) -> None:
        self.terms: list[weakref.ref[Cell]] = []
        """The tensors of these terms."""


class Cell:
    """Place of a value: this process's part, and its layout among all rows."""

    family: Family | None = None
    """None: no other tensor has its memory."""
    every: Any = None
    """All rows, or a function that computes them, if this process has them; outdated once the family has changed."""
    seen = 0
    """The family's version of `every`, or of a ghost's `local`."""
    ghost: tuple[Rows, tuple[Callable[[Tensor], Tensor], ...]] | None = None
    """The tensor of which this is a view, and the functions that make the view."""

    def __init__(self, local: Tensor, layout: TensorLayout) -> None:
        self.local, self.layout = local, layout

    def shares(self) -> Family:
        """Returns the family, which another tensor joins."""
        family = self.family
        if family is None:
            family = self.family = Family()
            family.numbers = self.layout.shape.numel()
            if self.layout.placement is PARTIAL:
                family.root = self.local
                family.terms.append(weakref.ref(self))
        family.cells += 1
        return family

    def lend(self, memory: Any) -> None:
        """Notes that a module's rows have this memory, which a write to it goes past."""
        if self.family is None:
            self.shares().cells -= 1
        self.family.lent = memory  # type: ignore[union-attr]

    def is_current(self) -> bool:
        """Returns whether `every` is up to date."""
        return self.every is not None and (self.family is None or self.seen == self.family.version)


class _Rules(dict[Any, Callable[..., Any]]):
    """The rule of each operator that was called, by operator."""

    rule_of: Callable[[Any], Callable[..., Any]]
    """Set by plans.py, which knows of rows' tensors."""

    def __missing__(self, operator: Any) -> Callable[..., Any]:
        self[operator] = made = self.rule_of(operator)
        return made


RULES = _Rules()


_data: Any = Tensor.data  # type: ignore[attr-defined]


class Rows(Tensor):
    """A tensor of all rows, of which each process holds its own."""

    __slots__ = ("_cell",)
    _cell: Cell
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:  # type: ignore[assignment]
        resolve_bits()
        NOW.context.dispatched += 1
        if len(types) > 1 and any(kind is not Rows for kind in types):
            refuse_kinds(operator, types)
        return RULES[operator](operator, arguments, options or {})

    # What leaves torch is all rows, on every process.

    def numpy(self, *, force: bool = False) -> Any:
        """Returns all rows. The array shares this tensor's memory, or is read-only where other tensors share it."""
        if (self.requires_grad or self.device.type != "cpu") and not force:
            return torch.empty(0, device=self.device, requires_grad=self.requires_grad).numpy()  # torch's own error
        cell = self._cell
        shared = cell.family is not None and (cell.family.cells > 1 or cell.family.origin is not None)
        if not shared and cell.layout.placement != GHOST:
            plain = full(self).resolve_conj().resolve_neg()
            cell.local = plain if cell.layout.placement is None else plain.clone()
            cell.layout, cell.every = cell.layout.placed(None), None
            return cell.local.numpy(force=force)
        array = full(self).resolve_conj().resolve_neg().numpy(force=force)
        array = array.view()
        array.flags.writeable = False
        return array

    @property
    def data(self) -> Any:
        """The same numbers without a record of autograd; set, it takes another tensor's numbers."""
        return _data.__get__(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        if type(new) is not Rows:
            new = rows_of(Cell(new.detach(), layout_of(new.shape, new.stride(), new.dtype, new.device)))
        _data.__set__(self, new)
        self._cell = new._cell

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.numpy().__array__(*arguments, **options)

    def tolist(self) -> Any:
        return full(self).tolist()

    def __iter__(self) -> Any:
        if not self.dim():
            return iter(torch.empty(()))  # torch's own error
        return iter(self.unbind(0))

    def __repr__(self, **_: Any) -> str:
        placement = self._cell.layout.placement
        if type(placement) is Placement and not NOW.context.gathers:
            return f"Rows({list(self.shape)}, dimension {placement.dim} in parts of {list(placement.sizes)})"
        plain = full(self).detach()
        if self.grad_fn is not None:
            made_by = self.grad_fn
            if made_by.name() == "FromLocalBackward":  # the last function within a module is ahead of it
                made_by = made_by.next_functions[0][0] or made_by
            return f"{plain!r}"[:-1] + f", grad_fn=<{made_by.name().rsplit('::', 1)[-1]}>)"
        return f"{plain.clone().requires_grad_()!r}" if self.requires_grad else f"{plain!r}"

    def __format__(self, spec: str) -> str:  # type: ignore[override]
        return format(self.item(), spec) if not self.dim() else object.__format__(full(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:  # type: ignore[override]
        return full(self).detach().clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __copy__(self) -> Rows:
        return self.detach().requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def __deepcopy__(self, memo: Any) -> Any:
        if self.grad_fn is not None:
            return (torch.empty(0, requires_grad=True) * 1).__deepcopy__(memo)  # torch's own error
        memo[id(self)] = made = self.detach().clone().requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        return made


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Rows, *_: Any, **__: Any) -> Any:
        raise GrappeError(
            f"Tensor.{name} of rows of a batch ({NOW.context.line()}): each process has a part of the memory only. "
            f"Take a plain copy first: grappe.rows.tensor.full(tensor)"
        )

    return refuse


for _name in (
    "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "__dlpack__", "set_", "resize_",
    "resize_as_", "__cuda_array_interface__", "sparse_resize_", "is_shared",
):  # fmt: skip
    _method = _refused(_name)
    setattr(Rows, _name, property(_method) if _name == "__cuda_array_interface__" else _method)


def refuse_kinds(operator: Any, types: Any) -> None:
    """Raises GrappeError for an operator of rows and of another kind of tensor with rules of its own."""
    if all(kind is Rows or issubclass(kind, fake_tensor_type()) for kind in types):
        return
    kinds = ", ".join(sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in types if kind is not Rows}))
    if "DTensor" in kinds:
        raise GrappeError(
            f"{operator} takes rows of a batch together with a parameter that is in parts under shard "
            f"({NOW.context.line()}): use replicate instead"
        )
    raise GrappeError(
        f"{operator} takes rows of a batch together with {kinds} ({NOW.context.line()}): make either plain"
    )


@contextlib.contextmanager
def reading_lists() -> Iterator[None]:
    """Context in which torch.tensor takes lists with rows in them, of which it would read the memory."""

    def reading(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def run(data: Any, *arguments: Any, **options: Any) -> Tensor:
            try:
                return make(data, *arguments, **options)
            except RuntimeError:
                if not any(type(each) is Rows for each in tree_leaves(data)):
                    raise
                plain = tree_map(lambda each: full(each).detach() if type(each) is Rows else each, data)
                return make(plain, *arguments, **options)

        return run

    before = torch.tensor, torch.as_tensor
    torch.tensor, torch.as_tensor = map(reading, before)
    try:
        yield
    finally:
        torch.tensor, torch.as_tensor = before


# ---- Making and reading them -------------------------------------------------------------------------------


def rows_of(cell: Cell) -> Rows:
    """Makes a tensor of a cell, which may be a view."""
    if torch.is_inference_mode_enabled():  # where a view of a tensor from outside is none of inference_mode
        with torch.inference_mode(False):
            made = wrapper_maker(Rows, *cell.layout.make)
    else:
        made = wrapper_maker(Rows, *cell.layout.make)
    throw_on_pointer(made)
    made._cell = cell
    return made


def wrapped(local: Tensor, layout: TensorLayout) -> Any:
    """Returns a new result: plain if every process has it."""
    if layout.placement is None:
        return local
    made = wrapper_maker(Rows, *layout.make)
    throw_on_pointer(made)
    made._cell = Cell(fitted(local, layout), layout)
    return made


def are_rows(each: Any, dim: int, rows: int) -> bool:
    """Returns whether a value is a plain tensor with `rows` rows in a dimension."""
    is_plain = type(each) is Tensor and each.layout is torch.strided
    return is_plain and each.dim() > dim and each.shape[dim] == rows


def usual_rows(batch: Any) -> int:
    """Returns the rows that most tensors of a batch have; 0 if it has none with rows."""
    counts = Counter(len(each) for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim())
    return counts.most_common(1)[0][0] if counts else 0


def split(plain: Tensor, dim: int = 0, *, shared: bool = False, sizes: tuple[int, ...] | None = None) -> Rows:
    """Returns a plain tensor, equal on all processes, as a tensor of which each has its own rows.

    Args:
        dim: the dimension of the rows.
        shared: whether the script may hold `plain` too, so that writes to either are seen in both.
        sizes: rows of each process; None: as equal as possible.
    """
    plain = plain.resolve_conj().resolve_neg()
    placement = Placement(dim % plain.dim(), even(plain.shape[dim]) if sizes is None else tuple(sizes))
    shape, stride = plain.shape, plain.stride()
    stride = stride if is_dense(plain) else dense_stride(shape, stride)
    layout = layout_of(shape, stride, plain.dtype, plain.device, placement, shared)
    local = fitted(own_part(plain.detach(), placement), layout)
    cell = Cell(local, layout)
    cell.every = _as_laid(plain, layout)
    family = cell.family = Family()
    family.numbers = plain.numel()
    if not shared:
        family.borrowed = plain
    else:
        family.origin, family.origin_version, family.base = plain, tensor_version(plain), cell
    return rows_of(cell)


def from_local(local: Tensor, placement: Any, stride: Any = None) -> Rows:
    """Returns this process's own rows, or its term of a sum, as a tensor of all rows, gathered when they are read.

    Args:
        stride: of all rows; None: contiguous, as an own part of one row, or of none, does not tell how they lie.
    """
    shape = local.shape
    if type(placement) is Placement:
        shape = torch.Size(resized(shape, placement.dim, placement.outer * placement.total))
    stride = dense_stride(shape, [0] * len(shape)) if stride is None else stride
    layout = layout_of(shape, stride, local.dtype, local.device, placement)
    return rows_of(Cell(fitted(local.detach(), layout), layout))


def local_rows(value: Any) -> Any:
    """Returns this process's own rows, or its term of a sum, of a tensor of rows; otherwise the value."""
    return own_local(value) if type(value) is Rows else value


def own_local(value: Rows) -> Tensor:
    """Returns the part that this process holds, up to date."""
    cell = value._cell
    if cell.layout.shared:
        settle(cell.family)
    return cell.local if cell.ghost is None else full(value)


def own_of(value: Any, placement: Placement) -> Any:
    """Returns this process's part of a tensor, wherever its rows are."""
    if type(value) is Rows:
        before = value._cell.layout.placement
        if before == placement:
            return own_local(value)
        if NOW.context.exchanges and type(before) is Placement:
            if before._replace(sizes=placement.sizes) == placement:
                return moved(own_local(value), before, placement.sizes)
            if before.dim != placement.dim and before.outer == placement.outer == 1:
                return turned(own_local(value), before, placement)
    return own_part(full(value), placement)


def embedded(value: Any) -> Any:
    """Returns own rows as a term of the sum of all processes' rows, which are zeros elsewhere."""
    layout = value._cell.layout
    placement = layout.placement
    term = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    every, dim = apart(term, placement)
    first = sum(placement.sizes[: NOW.context.rank])
    every.narrow(dim, first, placement.rows).copy_(apart(own_local(value), placement)[0])
    return term


def own_term(value: Any, processes: int) -> Tensor:
    """Returns this process's term of a value, which is the sum of all processes' terms."""
    placement = value._cell.layout.placement if type(value) is Rows else None
    if placement is PARTIAL:
        return own_local(value)
    return embedded(value) if type(placement) is Placement else full(value) / processes


def full(value: Any) -> Any:
    """Returns the plain tensor of all rows, which must not be written to; other values as they are."""
    if type(value) is not Rows:
        return value
    cell = value._cell
    placement = cell.layout.placement
    if placement is None:
        if cell.layout.shared:
            settle(cell.family)
        return cell.local
    if placement is PARTIAL:
        _add_up(cell)
        return cell.local
    family = cell.family
    if family is not None and family.origin is not None:
        settle(family)
    if cell.ghost is not None:
        if cell.seen != family.version:  # type: ignore[attr-defined]
            cell.local, cell.seen = replayed(cell.ghost), family.version  # type: ignore[attr-defined]
        return cell.local
    if cell.is_current():
        if not isinstance(cell.every, Tensor):
            cell.every = cell.every()
        return cell.every
    cell.every = _as_laid(gather(cell.local, placement), cell.layout)
    cell.seen = 0 if family is None else family.version
    return cell.every


def _as_laid(every: Tensor, layout: TensorLayout) -> Tensor:
    """Returns gathered rows in the order of memory that the tensor has."""
    if every.stride() == layout.stride or not every.numel() or 0 in layout.stride:
        return every
    stride = dense_stride(layout.shape, layout.stride)
    return torch.empty_strided(layout.shape, stride, dtype=every.dtype, device=every.device).copy_(every)


def _add_up(cell: Cell) -> None:
    """Adds up the terms of a sum, with those of its views: their memory stays shared."""
    family = cell.family
    if family is None or family.root is None:
        cell.local, cell.layout = summed(cell.local), cell.layout.placed(None)
        return
    root, total = family.root, summed(family.root)
    total = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device=root.device).copy_(total)
    for each in filter(None, (reference() for reference in family.terms)):
        local = each.local
        memory = torch.view_as_real(total) if root.is_complex() and not local.is_complex() else total
        first = root.storage_offset() * (root.element_size() // local.element_size())
        made = memory.as_strided(local.shape, local.stride(), local.storage_offset() - first)  # type: ignore[operator]
        each.local = made.conj() if local.is_conj() else made
        each.layout = each.layout.placed(None)
    family.root, family.terms = None, []


def settle(family: Any) -> None:
    """Carries writes of the script to a plain tensor over to the rows that were split from it."""
    if family.copied is not None:
        source, version = family.copied
        if source.version != version:
            raise refused("a view whose tensor was written to since", "take the view again, or a clone before")
        return
    origin = family.origin
    if origin is None:  # rows that were copied, and then written to
        return
    version = tensor_version(origin)
    if version == family.origin_version and not origin.is_inference():
        return
    family.origin_version = version
    family.version += 1
    base = family.base
    if base.local.untyped_storage().data_ptr() != origin.untyped_storage().data_ptr():
        base.local.copy_(own_part(origin, base.layout.placement))
    base.every, base.seen = _as_laid(origin, base.layout), family.version


def replayed(ghost: Any) -> Tensor:
    """Returns what a view shows of its base's rows."""
    root, chain = ghost
    made = full(root)
    for function in chain:
        made = function(made)
    return made


# ---- Writing to them ---------------------------------------------------------------------------------------


def own_memory(cell: Cell) -> None:
    """Has a write to an own part leave the rows of all, from which results may be computed later, as they were."""
    family = cell.family
    if family is not None and family.lent is not None:
        family.lent.is_written = True
    if family is not None and family.copied is not None:
        if not in_backward():  # where gradients are added into one that nobody else has
            raise refused(
                "a write to a view along the dimension that is cut", "write to a clone of it, or use torch.where"
            )
        family.copied = None
    if family is not None and family.borrowed is not None:
        family.borrowed.data = family.borrowed.data.clone()
        family.borrowed = None


def written(value: Rows) -> Rows:
    """Notes a write to the memory of a value, and carries it over to a plain tensor that shares it."""
    cell = value._cell
    family = cell.family
    if family is None:
        cell.every = None
        return value
    family.version += 1
    if family.origin is not None:
        base = family.base
        family.origin.copy_(gather(base.local, base.layout.placement))
        family.origin_version = tensor_version(family.origin)
        base.every, base.seen = _as_laid(family.origin, base.layout), family.version
    return value
