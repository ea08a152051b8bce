"""OwnRows: rows within a module, whose record of autograd is that of this process's own part.

A function of FUNCTIONS gives for own rows the own rows of its result; it is called with them, and its backward is
plain torch, which costs no Python. Any other function gets rows (`grappe.rows.tensor`) in their place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import (
    no_subclass_functions,
    no_transforms,
    tensor_version,
    transforms_active,
    tree_leaves,
    tree_map,
    wrapper_maker,
)
from grappe.rows.context import NOW
from grappe.rows.layout import PARTIAL, Placement, dense_stride, is_dense
from grappe.rows.tensor import Rows, from_local, full, own_local, own_memory, own_of, settle, written

FUNCTIONS: dict[Any, tuple[Callable[[Any, Any, Any], Any], int]] = {}
"""By function: its rule, and a number of it that all processes have.

A rule returns the result of (function, arguments, options), or NotImplemented: rows are taken.
"""


class OwnMemory:
    """State that views of one memory share."""

    source: Any = None
    """Rows outside of the module that have this memory."""
    is_lent = is_viewed = False
    """Whether rows, or rows within the module, that are a view of it exist."""
    is_written = is_followed = False
    """Whether it was written to as rows, of which this record of autograd knows nothing; then `source` has it."""


class OwnRows(Tensor):
    """A tensor of all rows within a module, by this process's own."""

    __slots__ = ("_local", "_memory", "_place", "_rows")
    _local: Tensor
    _memory: OwnMemory
    _place: Placement
    _rows: tuple[Rows, int] | None
    """The same as rows, with the version of `_local` that they were made of."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:  # type: ignore[override]
        # Where a transform of torch.func is active, the other arguments may be tensors of its level.
        rule = None if transforms_active() else FUNCTIONS.get(function)
        if rule is not None:
            now = NOW.context
            now.dispatched += 1
            now.trace = hash((now.trace, rule[1]))
            try:
                made = rule[0](function, arguments, options or {})
            except (GrappeError, torch.OutOfMemoryError):
                raise
            except _LEFT_TO_ROWS:
                made = NotImplemented
            if made is not NotImplemented:
                return made
        return _through_rows(function, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:  # type: ignore[override]
        # What no function announces: an extension of C++, for instance. Its gradients would be lost.
        own = [each for each in tree_leaves((arguments, options)) if type(each) is OwnRows]
        if torch.is_grad_enabled() and any(each._local.requires_grad for each in own):
            raise GrappeError(
                f"{operator} takes rows of a batch within a module ({NOW.context.line()}), where torch does not say so "
                "before. Call it with tensor.detach(), or in a torch.autograd.Function"
            )
        arguments, options = tree_map(as_rows, (arguments, options or {}))
        return operator(*arguments, **options)


def _memory_of(source: Rows) -> OwnMemory:
    made = OwnMemory()
    made.source = source
    return made


def _wrap_own(local: Tensor, place: Placement, memory: OwnMemory) -> OwnRows:
    layout = own_layout(local.shape, local.stride(), local.dtype, local.device, place)
    made: Any = wrapper_maker(OwnRows, *layout)
    made._local, made._place, made._memory, made._rows = local, place, memory, None
    return made


@functools.lru_cache(maxsize=20_000)
def own_layout(shape: Any, stride: Any, dtype: Any, device: Any, place: Placement) -> Any:
    """Returns the arguments of torch's maker of wrappers, from those of own rows."""
    dim = place.dim
    every = torch.Size((*shape[:dim], place.outer * place.total, *shape[dim + 1 :]))
    return every, dense_stride(every, stride), None, None, dtype, torch.strided, device


def new_own(local: Tensor, place: Placement) -> OwnRows:
    """Makes a module's rows of own ones that nobody else has."""
    return _wrap_own(local, place, OwnMemory())


def made_view(value: OwnRows, local: Tensor, place: Placement) -> OwnRows:
    """Returns a view, or what may be one."""
    value._memory.is_viewed = True
    return _wrap_own(local, place, value._memory)


def local_of(value: OwnRows) -> Tensor:
    """Returns the own rows of a value, for a function of it."""
    memory = value._memory
    if memory.is_written and not memory.is_followed:
        _take_over(value)
    if value._memory.is_followed:
        raise _Followed
    if memory.source is not None and memory.source._cell.layout.shared:
        settle(memory.source._cell.family)
    return value._local


def _take_over(value: OwnRows) -> None:
    """Takes over what rows of the same memory have become, of which views exist or that were written to."""
    if value._rows is None or value._memory.is_viewed:
        raise _no_rule("a write to rows of which a module has another view", "have the module keep a clone")
    value._memory = _memory_of(value._rows[0])
    value._memory.is_followed = True


class _Followed(Exception):
    """A value is as its rows are, which are taken."""


_LEFT_TO_ROWS = (_Followed, RuntimeError, IndexError, TypeError, ValueError, ArithmeticError)
"""Errors of own rows: rows make the one that a process alone has. A checkpoint ends a forward with another one."""


def _no_rule(what: str, instead: str) -> GrappeError:
    return GrappeError(f"grappe has no rule for {what} ({NOW.context.line()}): {instead}")


# ---- To and from rows --------------------------------------------------------------------------------------


class ToLocal(torch.autograd.Function):
    """From rows to this process's; gradients of these are the rows of a gradient.

    At PARTIAL it takes a parameter that all processes have: the gradients of their rows are terms of a sum.
    """

    @staticmethod
    def forward(ctx: Any, value: Any, placement: Any) -> Tensor:
        ctx.placement = placement
        return (value if placement is PARTIAL else own_of(value, placement)).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return FromLocal.apply(grad, ctx.placement), None


class FromLocal(torch.autograd.Function):
    """From this process's rows, or its term of a sum, to rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, placement: Any, stride: Any = None) -> Any:
        ctx.placement = placement
        return from_local(local, placement, stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return (ToLocal.apply(grad, ctx.placement) if type(ctx.placement) is Placement else full(grad)), None, None


def as_own(value: Any) -> Any:
    """Returns rows as a module's; other values as they are."""
    if type(value) is not Rows or transforms_active():  # an own part would have no tangent
        return value
    cell = value._cell
    place = cell.layout.placement
    # One row does not tell how rows lie in memory, in the order of which numbers are drawn.
    if type(place) is not Placement or min(place.sizes) < 2 or cell.ghost is not None:
        return value
    # Under no_grad too: a part of what has a gradient may be asked for it.
    local = ToLocal.apply(value, place) if value.requires_grad else own_local(value)
    made = _wrap_own(local, place, _memory_of(value))
    made._rows = value, tensor_version(local)
    cell.lend(made._memory)
    return made


def as_rows(value: Any) -> Any:
    """Returns a module's rows as rows; other values as they are."""
    if type(value) is not OwnRows:
        return value
    if value._memory.is_written and not value._memory.is_followed:
        _take_over(value)
    if value._rows is not None and value._rows[0] is value._memory.source:
        return value._rows[0]
    local = local_of(value)
    version = tensor_version(local)
    # torch does not count the writes to a tensor of inference_mode.
    if value._rows is not None and value._rows[1] == version and not local.is_inference():
        return value._rows[0]
    with no_subclass_functions():
        stride = value.stride()
    with no_transforms() if transforms_active() else contextlib.nullcontext():
        rows = FromLocal.apply(local, value._place, stride)
    rows._cell.lend(value._memory)
    if rows.requires_grad or not local.requires_grad:  # not under no_grad
        value._rows = rows, version
    if rows.grad_fn is not None:
        rows.grad_fn.local = local  # type: ignore[attr-defined]
    return rows


def made_of(value: Any) -> Any:
    """Returns a module's rows that rows were made of, from which its other results come; other values as they are."""
    node = value.grad_fn if type(value) is Rows else None
    local = getattr(node, "local", None)
    if node is None or local is None or node.next_functions[0] != (local.grad_fn, local.output_nr):
        return value
    return new_own(local, node.placement)  # type: ignore[attr-defined]


def _asking(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def ask(self: Rows, *arguments: Any) -> Any:
        own = made_of(self)
        return plain(self, *arguments) if own is self else getattr(own, name)(*arguments)

    return ask


class _Gradient:
    """The gradient of rows, which those that they were made of may have."""

    def __get__(self, rows: Any, kind: Any = None) -> Any:
        if rows is None:
            return self
        own = made_of(rows)
        return _grad.__get__(rows) if own is rows else own.grad

    def __set__(self, rows: Any, new: Any) -> None:
        own = made_of(rows)
        if own is not rows:
            rows, new = own._local, None if new is None else own_of(new, own._place)
        _grad.__set__(rows, new)


_grad: Any = Tensor.grad
Rows.register_hook, Rows.retain_grad = map(_asking, ("register_hook", "retain_grad"))  # type: ignore[method-assign]
Rows.grad = _Gradient()  # type: ignore[assignment]


def with_own_rows(call: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Calls a module; within one already, as where a forward is repeated in backward, results are its rows, too."""
    if any(type(each) is OwnRows for each in tree_leaves((arguments, options))):
        return call(*arguments, **options)
    arguments, options = tree_map(as_own, (arguments, options))
    NOW.context.within += 1
    try:
        return tree_map(as_rows, call(*arguments, **options))
    finally:
        NOW.context.within -= 1


def _through_rows(function: Any, arguments: Any, options: Any) -> Any:
    """Calls a function with rows; results that are rows are a module's again."""
    name = getattr(function, "__name__", "")
    if name in ("__set__", "__delete__"):
        if function.__self__ is not Tensor.requires_grad:  # type: ignore[attr-defined]
            raise _no_rule("a tensor's attribute that is set within a module", "set it outside")
        function, name = Tensor.requires_grad_, "requires_grad_"
    if "out" in options:
        left = {key: each for key, each in options.items() if key != "out"}
        into = lambda out, *arguments, **left: function(*arguments, **left, out=out)  # noqa: E731
        return _written(into, name, (options["out"], *arguments), left)
    if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or options.get("inplace") is True:
        return _written(function, name, arguments, options)
    taken = {id(each): each for each in tree_leaves((arguments, options)) if type(each) is OwnRows}
    rows = {id(each): as_rows(each) for each in taken.values()}
    for key, each in rows.items():
        if taken[key]._memory.is_viewed:
            each._cell.shares()  # an array of it is read-only
    arguments, options = tree_map(as_rows, (arguments, options))
    if getattr(Tensor, name, None) is function and name in vars(Rows):
        function = getattr(Rows, name)
    elif name == "__get__" and function.__self__ is Tensor.data:  # type: ignore[attr-defined]
        function = Rows.data.fget  # type: ignore[attr-defined]
    made = function(*arguments, **options)
    for key, each in rows.items():
        if each._cell.layout.placement != taken[key]._place and not taken[key]._memory.is_followed:
            _take_over(taken[key])  # an array has its memory now
    if not any(type(each) is Rows for each in tree_leaves(made)):
        return made
    families = {id(each._cell.family): taken[key] for key, each in rows.items()}

    def within(each: Any) -> Any:
        if type(each) is not Rows:
            return each
        for key, argument in rows.items():
            if each is argument:
                return taken[key]
        viewed = families.get(id(each._cell.family))
        if viewed is not None:
            viewed._memory.is_lent = True
            return each
        own = as_own(each)
        if type(own) is OwnRows:
            own._memory.source = None  # nobody else has it
            each._cell.lend(None)
        return own

    return tree_map(within, made)


_IN_PLACE = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
_DRAWS = {f"{each}_" for each in ("bernoulli", "uniform", "normal", "exponential", "random", "geometric", "log_normal",
                                  "cauchy")}  # fmt: skip
_OF_GRAPH = {"requires_grad_", "detach_"}
"""Functions that change the record of autograd alone."""


def _written(function: Any, name: str, arguments: Any, options: Any) -> Any:
    """Calls a function that writes to its first argument."""
    first, *others = arguments
    others, options = tree_map(as_rows, (others, options))
    if type(first) is not OwnRows:
        return function(first, *others, **options)
    if first._memory.is_lent and first._rows is not None and not first._memory.is_followed:
        _take_over(first)
    memory, source = first._memory, first._memory.source
    tensors = [each for each in (first, *tree_leaves((others, options))) if isinstance(each, Tensor)]
    tracked = name in _OF_GRAPH or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
    is_source = first._rows is not None and first._rows[0] is source
    if not memory.is_followed and (
        memory.is_lent or (source is not None and tracked and (memory.is_viewed or not is_source))
    ):
        raise _no_rule("a write to a view within a module", "write to a clone of it")
    if name in _DRAWS and not is_dense(first._local):
        raise _no_rule("a draw to a column within a module", "draw a tensor, and copy it")
    if name in _OF_GRAPH and source is None:
        getattr(first._local, name)(*others, **options)
        return first
    rows: Any = source if source is not None and (tracked or memory.is_followed) else as_rows(first).clone()
    made = function(rows, *others, **options)
    if memory.is_followed:
        return first if made is rows else made
    own: Any = as_own(rows)
    if type(own) is not OwnRows or own._local.shape != first._local.shape:
        raise _no_rule("a write that changes a shape within a module", "use the function without a final _")
    if rows is source:
        first._local, first._rows, first._memory = own._local, own._rows, own._memory
    else:
        write_own(first, lambda: first._local.copy_(own._local))
    return first if made is rows else made


def write_own(value: OwnRows, run: Callable[[], Any]) -> None:
    """Runs a write to own memory, which rows outside of the module may have, too."""
    source = value._memory.source
    if source is None:
        run()
        return
    own_memory(source._cell)
    value._memory.is_written = False
    run()
    written(source)
    if value._rows is not None and value._rows[0] is source:
        value._rows = source, tensor_version(value._local)
