"""The default of an operator without a rule: its arguments are gathered, and each process computes all rows."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import in_backward, operator_schema, tree_leaves, tree_map, without_torch_dispatch
from grappe.rows.context import NOW, GatheredAt
from grappe.rows.exchange import refused
from grappe.rows.layout import GHOST, PARTIAL, Placement, layout_of, overlaps
from grappe.rows.messages import operator_that_runs, own_part
from grappe.rows.tensor import Cell, Rows, embedded, full, own_memory, replayed, rows_of, wrapped, written

REAL = {torch.ops.aten.view_as_real.default: lambda tensor: torch.view_as_real(tensor.resolve_conj())}
"""torch resolves a conjugate bit before it calls the operator; a wrapper shows none."""


def gathered(operator: Any, arguments: Any, options: Any) -> Any:
    """Runs an operator on all rows. Right for every operator: what it writes goes back to where it was."""
    if torch.Tag.inplace_view in operator.tags:
        return _view_in_place(operator, arguments, options)
    leaves = [each for each in tree_leaves((arguments, options)) if type(each) is Rows]
    now = NOW.context
    code = sum(each._cell.layout.code for each in leaves)
    now.trace = hash((now.trace, code))
    at = None
    if any(type(each._cell.layout.placement) is Placement for each in leaves):
        if not now.gathers:
            return _of_whole_tensors(operator, arguments, options, leaves)
        at = GatheredAt(str(operator).removeprefix("aten."), now.line())
        now.gathered[at] += 1
    started = time.perf_counter()
    result = _on_all_rows(operator, arguments, options)
    if at is not None:
        now.seconds[at] += time.perf_counter() - started  # type: ignore[assignment]
    return result


def _of_whole_tensors(operator: Any, arguments: Any, options: Any, leaves: list[Rows]) -> Any:
    """Returns terms of the gradients of what every process has whole; refuses what is not linear in one with rows."""
    gradient = arguments[0] if arguments else None
    placed = [each for each in leaves if type(each._cell.layout.placement) is Placement]
    name = operator.overloadpacket.__name__
    is_linear = name.endswith("_backward") or (in_backward() and name in ("view", "_unsafe_view"))
    if not is_linear or any(each is not gradient for each in placed):
        raise refused(operator_that_runs())
    made = operator(embedded(gradient), *map(full, arguments[1:]), **options)

    def term(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return wrapped(each, layout_of(each.shape, each.stride(), each.dtype, each.device, PARTIAL))

    return tree_map(term, made)


def _on_all_rows(operator: Any, arguments: Any, options: Any) -> Any:
    schema = operator_schema(operator)
    if not schema.is_mutable and _is_view(schema):
        return _ghosts(operator, arguments, options)
    targets: list[Rows] = []
    if schema.is_mutable:
        named = dict(zip((each.name for each in schema.arguments), arguments, strict=False)) | options
        for each in schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write and each.name in named:
                targets += [leaf for leaf in tree_leaves(named[each.name]) if type(leaf) is Rows]
    copies = {id(each): _copied(each) for each in targets}
    plain = tree_map(
        lambda each: copies.get(id(each), full(each)) if type(each) is Rows else each, (arguments, options)
    )
    result = operator(*plain[0], **plain[1])
    for each in targets:
        if each.shape != copies[id(each)].shape:
            raise GrappeError(
                f"{operator} changes the size of a tensor of the batch ({NOW.context.line()}): take a copy"
            )
        write(each, copies[id(each)])
    if not targets:
        return result
    back = {id(copies[id(each)]): each for each in targets}
    return tree_map(lambda each: back.get(id(each), each) if isinstance(each, Tensor) else each, result)


def _copied(value: Rows) -> Tensor:
    """Returns all rows in new memory with the same strides, gaps too: torch draws into it in another way without."""
    if overlaps(value._cell.layout):
        return full(value).clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(full(value))


def _is_view(schema: Any) -> bool:
    # Torch tells autograd that these are none; their results share memory all the same.
    return schema.name.startswith(("aten::unsafe_", "aten::_unsafe_view")) or any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def _ghosts(operator: Any, arguments: Any, options: Any) -> Any:
    """Returns a view of all rows, which is read from its base and written through it."""
    base = arguments[0]
    cell = base._cell
    rest = [full(each) for each in arguments[1:]]
    operator = REAL.get(operator, operator)
    root, chain = cell.ghost if cell.ghost is not None else (rows_of(cell), ())
    made = operator(full(base), *rest, **options)

    def ghost(view: Tensor, index: int | None) -> Rows:
        def again(tensor: Tensor) -> Tensor:
            result = operator(tensor, *rest, **options)
            return result if index is None else result[index]

        of = Cell(view, layout_of(view.shape, view.stride(), view.dtype, view.device, GHOST))
        of.ghost = (root, (*chain, again))
        of.family = cell.shares()
        of.seen = of.family.version
        return rows_of(of)

    return [ghost(each, at) for at, each in enumerate(made)] if isinstance(made, (list, tuple)) else ghost(made, None)


def _view_in_place(operator: Any, arguments: Any, options: Any) -> Any:
    """Runs unsqueeze_, t_ and their like: the tensor becomes a view of what it was."""
    value = arguments[0]
    if type(value) is not Rows:
        return operator(*map(full, arguments), **options)
    schema = operator_schema(operator)
    view: Any = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    overloads = [] if view is None else view.overloads()
    overload = next((each for each in (schema.overload_name or "default", "int") if each in overloads), None)
    family = value._cell.family
    shared = family is not None and family.origin is not None
    if overload is None or shared or not _is_view(operator_schema(getattr(view, overload))):
        raise GrappeError(f"{operator} on rows of a batch ({NOW.context.line()}): take a clone of the tensor first")
    made = getattr(view, overload)(rows_of(value._cell), *arguments[1:], **options)
    with without_torch_dispatch():
        operator(value, *arguments[1:], **options)
    value._cell = made._cell
    return value


def write(value: Rows, new: Tensor) -> None:
    """Writes the numbers of all rows into a value, wherever its memory is."""
    cell = value._cell
    if cell.ghost is not None:
        root, chain = cell.ghost
        if overlaps(cell.layout):
            raise GrappeError(f"a write to a view whose places overlap ({NOW.context.line()}): write to a clone of it")
        base = full(root).clone()
        made = replayed((base, chain))
        made.copy_(new)
        write(root, base)
        cell.local, cell.seen = made, cell.family.version  # type: ignore[union-attr]
        return
    placement = cell.layout.placement
    if type(placement) is Placement:
        own_memory(cell)
        cell.local.copy_(own_part(new, placement))
    else:
        cell.local.copy_(new)
        cell.layout = cell.layout.placed(None)
    written(value)
