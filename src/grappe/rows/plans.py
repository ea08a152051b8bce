"""Plans: how an operator is computed from own parts, decided once for the layouts of its arguments.

A rule looks at a `RuleCall` and returns a `Way`: where each tensor is taken, and where the results are. Without a way
the call is gathered. Shapes and strides of results are those that torch computes for all rows, on meta tensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from grappe.errors import PlanError
from grappe.private_api.torch import COMPOSITE, fake_tensor_type, fake_tensors, no_modes, operator_schema
from grappe.rows.context import NOW, RowsContext
from grappe.rows.gathered import gathered
from grappe.rows.layout import PARTIAL, Placement, TensorLayout, dense_stride, fitted, layout_of
from grappe.rows.tensor import (
    RULES,
    Cell,
    Family,
    Rows,
    embedded,
    full,
    own_local,
    own_memory,
    own_of,
    reading_lists,
    rows_of,
    wrapped,
    written,
)

AS_IS = "as is"
"""Arguments of which only shape and type matter."""
FIRST = "first"
"""A result that is the first argument, which is written to."""
_MOST_PLANS = 5_000  # of an operator, with shapes or numbers that never repeat


@dataclass(frozen=True, kw_only=True)
class Way:
    """Computation of a call from own parts."""

    results: Any = None
    """Placement of each result, or a tuple of them; None: equal on all processes; FIRST."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Placements at which tensors are taken, by argument; others: as they broadcast with the call's leading rows."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are others for an own part."""
    operator: Any = None
    """Function that is called instead of the operator."""
    after: Callable[[Any], Any] | None = None
    """Function of the result: it scales, or reduces by a message."""
    identity: float = 0
    """The numbers of a process's part that has no rows, before `after`."""
    view: bool = False
    """Whether results share the first argument's memory."""
    copied: bool = False
    """Whether results are a view's rows, copied from where the parts lie in the first argument."""
    same: bool = False
    """Whether the result of the first argument's rows, if this process has all of them, needs no message."""


class RuleCall:
    """An operator's call as rules see it: by argument's name, a layout in place of each tensor."""

    def __init__(self, operator: Any, arguments: Any, options: Any) -> None:
        self.operator, schema = operator, operator_schema(operator)
        self.name, self.overload = schema.name.removeprefix("aten::"), schema.overload_name
        self.names = [each.name for each in schema.arguments]
        defaults = {each.name: each.default_value for each in schema.arguments}
        given_names = dict(zip(self.names, arguments, strict=False)) | dict(options)
        self.arguments: Any = (arguments, options)
        self.values: dict[str, Any] = {name: _as_layout(value) for name, value in (defaults | given_names).items()}
        self.layouts = [leaf for value in self.values.values() for leaf in (value if type(value) is list else [value])]
        self.layouts = [each for each in self.layouts if type(each) is TensorLayout]
        led = [each for each in self.layouts if type(each.placement) is Placement]
        self.lead: Any = max(led, key=lambda each: len(each.shape), default=None)
        """The rows of most dimensions; None: no argument has rows."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def first(self) -> Any:
        """TensorLayout of the first argument."""
        return self.values[self.names[0]]

    @functools.cached_property
    def results(self) -> Any:
        """The results for all rows, as meta tensors; None if torch cannot tell them."""
        return results_on_meta(self.operator, *self.arguments)

    @property
    def placement(self) -> Placement:
        """Placement of the leading rows."""
        return self.lead.placement

    def aligned(self, layout: TensorLayout, lead: Any = None) -> Any:
        """Returns where a tensor is taken that is broadcast with the leading rows; None: it has no such dimension."""
        lead = self.lead if lead is None else lead
        dim = lead.placement.dim - len(lead.shape) + len(layout.shape)
        if dim < 0 or (layout.shape[dim] == 1 and lead.shape[lead.placement.dim] != 1):
            return None
        if layout.shape[dim] != lead.shape[lead.placement.dim]:
            raise Unalike
        return lead.placement._replace(dim=dim)


class Unalike(Exception):
    """A dimension has other sizes than that of the leading rows: the call is gathered."""


Rule = Callable[[RuleCall], Any]
"""Returns a Way, a procedure of (operator, arguments, options), or None to gather."""
TABLE: dict[str, Rule] = {}
"""Rules by an operator's name, or by its name and overload."""
ALONG: dict[str, Rule] = {}
"""Rules by an operator's name of what works along the dimension of the rows, by rows of other processes."""
ELEMENTWISE = ("gelu_backward", "fill_")
"""Operators with the rules of all that torch tags as pointwise: those that return a tensor, and that write to one."""
FILES = ("along", "attention", "draws", "norms", "rules", "space", "views")
"""Files of this folder that fill the tables; they import this one."""
PROCEDURES: dict[str, Callable[..., Any]] = {}
"""Functions of (operator, arguments, options) that run instead of an operator; NotImplemented gathers."""


def _registering(table: dict[str, Any]) -> Callable[[str], Callable[[Any], Any]]:
    """Makes a decorator that enters a function into a table, under the names of operators."""

    def register(names: str) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            table.update(dict.fromkeys(names.split(), function))
            return function

        return add

    return register


rule = _registering(TABLE)
along = _registering(ALONG)
procedure = _registering(PROCEDURES)


def along_by(names: str, of: Callable[[RuleCall], Any]) -> Callable[[Callable[[RuleCall, Any], Any]], Rule]:
    """Makes a decorator as `along`, for rules that also take what `of` returns of a call; None: no rule is for it."""
    return lambda decide: along(names)(lambda call: None if (how := of(call)) is None else decide(call, how))


def rule_of(operator: Any) -> Callable[..., Any]:
    """Returns what runs instead of an operator that is called for the first time."""
    for file in FILES:
        importlib.import_module(f"grappe.rows.{file}")
    schema = operator_schema(operator)
    if operator.namespace != "aten":
        return _decomposed(operator)
    name, overload = schema.name.removeprefix("aten::"), schema.overload_name
    for key in (f"{name}.{overload or 'default'}", name):
        if overload in ("out", "grad_input") or overload.endswith("_out"):
            break
        if key in PROCEDURES:
            return _fallible(PROCEDURES[key])
        if key in TABLE or key in ALONG:
            # Without a rule but one along the dimension of the rows, others are gathered.
            return _Planned(operator, TABLE.get(key, lambda call: None))
    if torch.Tag.pointwise in operator.tags and not any(each.is_out for each in schema.arguments):
        return _Planned(operator, TABLE[ELEMENTWISE[schema.is_mutable]], by_type=True)
    return _decomposed(operator)


RULES.rule_of = rule_of


def _decomposed(operator: Any) -> Callable[..., Any]:
    """Takes apart what torch takes apart itself where tensors are not made in inference_mode; gathers anything else."""
    if not operator.has_kernel_for_dispatch_key(COMPOSITE):
        return gathered
    return lambda operator, arguments, options: operator.decompose(*arguments, **options)


def _fallible(function: Any) -> Callable[..., Any]:
    def run(operator: Any, arguments: Any, options: Any) -> Any:
        now = NOW.context
        code = next((each._cell.layout.code for each in arguments if type(each) is Rows), 0)
        now.trace = hash((now.trace, code))
        result = function(operator, arguments, options)
        return gathered(operator, arguments, options) if result is NotImplemented else result

    return run


def _as_layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) is Rows:
            return value._cell.layout
        return layout_of(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return [_as_layout(each) for each in value]
    return value


# ---- Signatures --------------------------------------------------------------------------------------------


def _signature(values: Any, by_type: bool) -> tuple[Any, ...]:
    """Returns the key of a call: layouts, and what is not a tensor; of numbers only their types if `by_type`."""
    key: list[Any] = []
    for each in values:
        kind = type(each)
        if kind is Rows:
            key.append(each._cell.layout)
        elif kind is Tensor or kind is Parameter:
            if each.layout is not torch.strided:
                raise _OtherKind
            key.append((each.shape, each.stride(), each.dtype, each.device))
        elif kind is float or kind is int or kind is bool:
            key.append(kind if by_type else (kind, each))
        elif kind is list or kind is tuple:
            key.append(_signature(each, by_type))
        elif isinstance(each, fake_tensor_type()):
            key.append((each.shape, each.stride(), each.dtype, each.device))
        elif isinstance(each, Tensor):
            raise _OtherKind
        else:
            key.append(each)
    return tuple(key)


class _OtherKind(RuntimeError):
    """A sparse tensor, or a user's subclass of Tensor, which makes results of its class: of plain tensors it can."""


class _Planned:
    """An operator with a rule: plans by the signature of its calls."""

    def __init__(self, operator: Any, decide: Rule, *, by_type: bool = False) -> None:
        self.operator, self.decide, self.by_type = operator, decide, by_type
        self.plans: dict[Any, Any] = {}

    def __call__(self, operator: Any, arguments: Any, options: Any) -> Any:
        try:
            key = _signature(arguments, self.by_type)
            if options:
                key = (key, tuple(options), _signature(options.values(), self.by_type))
        except RuntimeError:  # or a nested tensor, which has no strides
            return gathered(operator, arguments, options)
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            plan = self.plans[key] = self.plan(arguments, options)
        return plan(operator, arguments, options)

    def plan(self, arguments: Any, options: Any) -> Callable[..., Any]:
        """Decides for a signature."""
        call = RuleCall(self.operator, arguments, options)
        try:
            way = self._way(call)
            if isinstance(way, Way):
                return _plan(call, way, arguments, options) or gathered
        except Unalike:
            way = None
        finally:
            call.arguments = None  # a plan that keeps the call keeps no tensor
        return gathered if way is None else _fallible(way)

    def _way(self, call: RuleCall) -> Any:
        way = None
        sizes = [each.placement.sizes for each in call.layouts if type(each.placement) is Placement]
        if NOW.context.exchanges and call.name in ALONG and all(map(all, sizes)) and call.results is not None:
            try:
                way = ALONG[call.name](call)
            except PlanError:
                if not NOW.context.gathers:
                    raise
        return self.decide(call) if way is None else way


# ---- From a way to a plan ----------------------------------------------------------------------------------


def _plan(call: RuleCall, way: Way, arguments: Any, options: Any) -> Callable[..., Any] | None:
    """Returns what runs a way; None if torch cannot tell the results' shapes, or they are not what the rule says."""
    takes, named, empty = _takes(call, way, arguments, options)
    code = zlib.crc32(f"{call.operator} {call.layouts}".encode())
    operator, prepared = way.operator, _prepared(takes, named, code)
    metas = call.results
    if metas is None:
        return None
    if way.results == FIRST:
        return _in_place(operator, prepared, empty)
    many = isinstance(metas, (list, tuple))
    places = way.results if type(way.results) in (list, tuple) else None
    layouts: list[Any] = []
    device = options.get("device") or (call.lead or call.layouts[0]).device
    shared = (way.view and call.first.shared) or way.copied
    for at, meta in enumerate(metas if many else [metas]):
        placement = places[at] if places is not None else way.results
        if not isinstance(meta, Tensor):
            layouts.append(meta)
            continue
        if type(placement) is Placement:
            dim, rows = placement.dim, placement.outer * placement.total
            if dim >= len(meta.shape) or meta.shape[dim] != rows:
                return None
        stride = dense_stride(meta.shape, meta.stride()) if way.copied else meta.stride()
        layouts.append(layout_of(meta.shape, stride, meta.dtype, torch.device(device), placement, shared))
    if way.view:
        return _view(operator, prepared, layouts, many)
    single = None if many else layouts[0]
    after, kind = way.after, type(metas)

    def run(function: Any, arguments: Any, options: Any) -> Any:
        local, own_options = prepared(arguments, options)
        if empty:
            made = [blank(each, way.identity) for each in layouts]
            made = made if many else made[0]
        else:
            made = (operator or function)(*local, **own_options)
        if after is not None:
            made = after(made)
        if way.copied:
            before = arguments[0]._cell.shares()
            results = [_copied_from(before, *each) for each in zip(made if many else [made], layouts, strict=True)]
            return results if many else results[0]
        if single is not None:
            result = wrapped(made, single)  # type: ignore[arg-type]
            if way.same and (before := arguments[0]._cell).is_current() and not before.layout.shared:
                _keep(result, before, lambda every: function(every, *arguments[1:], **options))
            return result
        return kind(
            wrapped(each, layout) if type(layout) is TensorLayout and each is not None else each
            for each, layout in zip(made, layouts, strict=True)
        )

    return run


def blank(layout: Any, identity: float = 0) -> Any:
    """Returns the part of a process without rows: nothing, or the numbers that change no sum."""
    if type(layout) is not TensorLayout:
        return layout
    if math.isinf(identity) and not layout.dtype.is_floating_point:
        limits = torch.iinfo(torch.uint8 if layout.dtype is torch.bool else layout.dtype)
        identity = limits.max if identity > 0 else limits.min
    return torch.full(layout.local_shape, identity, dtype=layout.dtype, device=layout.device)


def results_on_meta(operator: Any, arguments: Any, options: Any) -> Any:
    """Returns an operator's results for all rows as meta tensors; None if torch cannot tell them, or raises an error.

    The error comes again when the call is gathered, with the text that torch has for plain tensors.
    """

    fake = operator in _BY_DEVICE and any(isinstance(e, Tensor) and not e.is_contiguous() for e in arguments)
    mode = fake_tensors() if fake else contextlib.nullcontext()

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            device = value.device if fake else "meta"
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return [meta(each) for each in value] if isinstance(value, (list, tuple)) else value

    try:
        with no_modes(), mode:
            named = {name: meta(value) for name, value in options.items() if name != "pin_memory"}
            if named.get("device") is not None:
                named["device"] = torch.device("meta")
            return operator(*map(meta, arguments), **named)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return None


_BY_DEVICE = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
"""Operators whose results lie in memory as the device's library likes."""


def _takes(call: RuleCall, way: Way, arguments: Any, options: Any) -> tuple[list[Any], list[Any], bool]:
    """Returns what takes arguments' own parts, by position and by name; and whether this process's have no rows."""
    takes, named, empty = [], [], type(way.results) is Placement and not way.results.rows
    for index, name in enumerate(call.names):
        is_named = index >= len(arguments)
        if is_named and name not in options and name not in way.constants:
            continue
        several = type(call[name]) is list
        layouts = call[name] if several else [call[name]]
        take = None
        if name in way.constants:
            take = functools.partial(_constant, way.constants[name])
        elif any(type(each) is TensorLayout for each in layouts):
            tensors = options[name] if is_named else arguments[index]
            tensors, at = tensors if several else [tensors], way.at.get(name, ...)
            if at is ...:
                places = [call.aligned(each) if call.lead and type(each) is TensorLayout else None for each in layouts]
            else:
                places = at if several else [at]
            parts = [
                _take(layout, place, type(each) is Rows) if type(layout) is TensorLayout else None
                for layout, place, each in zip(layouts, places, tensors, strict=True)
            ]
            take = _of_list(parts) if several else parts[0]
            empty |= any(type(each) is Placement and not each.rows for each in places)
        if take is not None:
            (named if is_named else takes).append((name if is_named else index, take))
    return takes, named, empty


def _constant(value: Any, _: Any) -> Any:
    return value


def _of_list(takes: list[Any]) -> Callable[[Any], Any]:
    return lambda values: [value if take is None else take(value) for value, take in zip(values, takes, strict=True)]


def _local(value: Any) -> Any:
    return value._cell.local


def _take(layout: TensorLayout, at: Any, is_rows: bool) -> Callable[[Any], Any] | None:
    """Returns what takes a tensor of this layout at a placement; None: it is taken as it is."""
    if at == AS_IS:
        return _local if is_rows else None
    if at is None:
        return full if is_rows else None
    if at is PARTIAL:
        if layout.placement is PARTIAL:
            return _local
        return embedded if type(layout.placement) is Placement else _first_only
    if is_rows and layout.placement == at:
        return own_local if layout.shared else _local
    return lambda value: own_of(value, at)


def _first_only(value: Any) -> Any:
    """Returns a term of a sum to which the others add nothing."""
    every = full(value)
    return every if NOW.context.rank == 0 else torch.zeros_like(every)


def _in_place(operator: Any, prepared: Any, empty: bool) -> Callable[..., Any]:
    def run(function: Any, arguments: Any, options: Any) -> Any:
        local, own_options = prepared(arguments, options)
        first = arguments[0]
        if type(first) is Rows:
            own_memory(first._cell)
        if not empty:
            (operator or function)(*local, **own_options)
        return written(first) if type(first) is Rows else first

    return run


def _prepared(takes: Any, named: Any, code: int) -> Callable[..., Any]:
    """Returns what makes the arguments for an own part."""

    def run(arguments: Any, options: Any) -> tuple[list[Any], Any]:
        now = NOW.context
        now.trace = hash((now.trace, code))
        local = [*arguments]
        for index, take in takes:
            local[index] = take(local[index])
        if named:
            options = {**options, **{name: take(options.get(name)) for name, take in named}}
        return local, options

    return run


def _view(operator: Any, prepared: Any, layouts: list[Any], many: bool) -> Callable[..., Any]:
    def run(function: Any, arguments: Any, options: Any) -> Any:
        local, own_options = prepared(arguments, options)
        made = (operator or function)(*local, **own_options)
        before = arguments[0]._cell
        if many:
            return [_view_of(before, each, layout) for each, layout in zip(made, layouts, strict=True)]
        result = _view_of(before, made, layouts[0])
        if before.every is not None and before.is_current():
            _keep(result, before, lambda every: function(every, *arguments[1:], **options))
        return result

    return run


def _copied_from(before: Family, local: Tensor, layout: TensorLayout) -> Rows:
    cell = Cell(fitted(local, layout), layout)
    cell.family = Family()
    cell.family.copied = before, before.version
    return rows_of(cell)


def _view_of(before: Cell, local: Tensor, layout: TensorLayout) -> Rows:
    family = before.shares()
    cell = Cell(local, layout)
    cell.family, cell.seen = family, family.version
    if layout.placement is PARTIAL:
        family.terms.append(weakref.ref(cell))
    return rows_of(cell)


def _keep(result: Any, before: Cell, function: Callable[[Tensor], Tensor]) -> None:
    """Has the result's rows computed from those of its argument, when they are asked for, without a message."""
    every = before.every
    cell = result._cell
    cell.every = lambda: function((every if isinstance(every, Tensor) else every()).resolve_conj())
    cell.seen = 0 if cell.family is None else cell.family.version


@contextlib.contextmanager
def activate(context: RowsContext) -> Iterator[RowsContext]:
    """Context in which rows are shared between the processes of `context`."""
    before, NOW.context = NOW.context, context
    try:
        with reading_lists():
            yield context
    finally:
        NOW.context = before
