"""Recording: records the operators that a step calls on fake tensors, with what each reads, writes and computes."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from grappe.foresight.kernels import nested
from grappe.private_api.torch import operator_mutates, tree_leaves

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


UNCOUNTED = ("prim", "profiler")
"""Namespaces of operators that ask for a property of a tensor, or mark a place."""
COLLECTIVES = {
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
}
"""Operators of split modules that send messages, by name, and the names of their collectives."""


class Ref(NamedTuple):
    """A tensor of a recording: a window on a numbered storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    kind: str
    """Type of its numbers: "float32"."""

    @property
    def nbytes(self) -> int:
        """Computes the bytes of its numbers."""
        count = 1
        for size in self.size:
            count *= size
        return count * getattr(torch, self.kind).itemsize

    @property
    def end(self) -> int:
        """Computes the bytes of its storage up to its last number."""
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum(max(0, size - 1) * abs(step) for size, step in steps)
        return (last + 1) * getattr(torch, self.kind).itemsize


class Operator(NamedTuple):
    """One call of an operator."""

    name: str
    """aten.mm.default"""
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    outputs: tuple[Ref, ...]
    mark: int
    """Number of the trace's next mark."""
    flops: int
    view: bool
    """Whether it computes nothing: its output is a view."""
    ended: tuple[int, ...]
    """Storages that ended before it."""

    @property
    def key(self) -> str:
        """Describes the call without saying which tensors: calls of the same key take the same time."""
        return " ".join([self.name, _key(self.arguments), _key(self.keywords)])

    @property
    def collective(self) -> str | None:
        """Returns the name of the collective that it is; None: it sends nothing."""
        return COLLECTIVES.get(self.name)

    @property
    def message(self) -> int:
        """Computes the bytes of a collective's whole message: what is summed or gathered."""
        return max(ref.nbytes for ref in (*nested(self.arguments, Ref), *self.outputs))

    @property
    def moved(self) -> int:
        """Computes the bytes that are read and written, each tensor once."""
        refs = {ref[:4]: ref.nbytes for ref in (*nested((self.arguments, self.keywords), Ref), *self.outputs)}
        return sum(refs.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """The operators of a part of a step, in order."""

    operators: tuple[Operator, ...]
    given: tuple[tuple[int, int, bool], ...]
    """Storages that were there before: number, bytes, whether they hold decimal numbers."""
    positive: bool = False
    """Whether those are above 0: some kernels take longer for the square root of less."""
    gradients: frozenset[int] = frozenset()
    """Storages of gradients: a training keeps them until the update, though the trace has taken them away."""

    @functools.cached_property
    def counts(self) -> Counter[str]:
        """Counts the distinct calls, views too."""
        return Counter(one.key for one in self.operators)

    @functools.cached_property
    def peak(self) -> int:
        """Computes the most bytes that its storages take at once, with all gradients."""
        live = {number: size for number, size, _ in self.given}
        now = most = sum(live.values())
        for one in self.operators:
            now -= sum(live.pop(number, 0) for number in one.ended if number not in self.gradients)
            for ref in one.outputs:
                if ref.storage not in live:
                    live[ref.storage] = ref.end
                    now += ref.end
            most = max(most, now)
        return most

    @property
    def messages(self) -> list[tuple[str, int]]:
        """Returns the messages of split modules, each with its collective's name and its bytes."""
        return [(one.collective, one.message) for one in self.operators if one.collective is not None]


class Recorder:
    """Describes operators as a mode sees them.

    Args:
        known: tensors that are there before.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self._numbers: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._ends: dict[int, weakref.ref] = {}
        self._ended: list[int] = []
        self._given: dict[int, tuple[int, int, bool]] = {}
        self._gradients: set[int] = set()
        self._next = 0
        self._operators: list[Operator] = []
        for tensor in known:
            self._given_by(tensor)

    def add(self, operator: Any, arguments: Any, keywords: Any, output: Any, mark: int) -> None:
        """Records a call, unless it computes nothing by its kind."""
        if operator.namespace in UNCOUNTED:
            return
        described = _describe(arguments, self._given_by)
        named = tuple(sorted((name, _describe(value, self._given_by)) for name, value in keywords.items()))
        before = self._next
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        outputs = tuple(_ref(leaf, self._number(leaf)) for leaf in made)
        old = all(one.storage < before for one in outputs)
        self._operators.append(
            Operator(
                name=str(operator),
                arguments=described,
                keywords=named,
                outputs=outputs,
                mark=mark,
                flops=_flops(operator, arguments, keywords, output),
                view=bool(outputs) and old and not operator_mutates(operator),
                ended=tuple(self._ended),
            )
        )
        self._ended.clear()

    def gradient(self, tensor: Tensor) -> None:
        """Records that a tensor is a parameter's gradient."""
        self._gradients.add(self._number(tensor))

    def recording(self) -> Recording:
        """Returns what was recorded."""
        return Recording(
            operators=tuple(self._operators),
            given=tuple(self._given.values()),
            gradients=frozenset(self._gradients),
        )

    def _given_by(self, tensor: Tensor) -> int:
        new = self._next
        number = self._number(tensor)
        if number == new:
            self._given[number] = (number, tensor.untyped_storage().nbytes(), tensor.is_floating_point())
        return number

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        found = self._numbers.get(storage)
        if found is None:
            found = self._numbers[storage] = self._next
            self._next += 1
            number = found

            def ended(_: Any) -> None:
                self._ends.pop(number, None)
                self._ended.append(number)

            self._ends[number] = weakref.ref(storage, ended)
        return found


def _flops(operator: Any, arguments: Any, keywords: Any, output: Any) -> int:
    name = operator.overloadpacket
    if str(name).endswith("attention_for_cpu"):  # counted for GPUs' kernels only
        return sdpa_flop_count(*(one.shape for one in arguments[:3]))
    if str(name).endswith("attention_for_cpu_backward"):
        return sdpa_backward_flop_count(*(one.shape for one in arguments[:4]))
    count = flop_registry.get(name)
    return 0 if count is None else int(count(*arguments, **keywords, out_val=output))


def _describe(value: Any, number: Any) -> Any:
    if isinstance(value, Tensor):
        return _ref(value, number(value)) if value.layout == torch.strided else None
    if isinstance(value, list | tuple):
        return tuple(_describe(one, number) for one in value)
    return value if isinstance(value, PLAIN) else None


def _ref(tensor: Tensor, number: int) -> Ref:
    kind = str(tensor.dtype).removeprefix("torch.")
    return Ref(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), kind)


def _key(value: Any) -> str:
    if isinstance(value, Ref):
        return f"{value.kind}{list(value.size)}/{list(value.stride)}".replace(" ", "")
    if isinstance(value, tuple):
        return "(" + ",".join(_key(one) for one in value) + ")"
    return str(value)
