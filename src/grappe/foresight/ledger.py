"""Ledger: counts tensors' bytes, and records operators, while a step runs on fake tensors, which have no memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from grappe.private_api.torch import TorchDispatchMode, operator_mutates, tree_leaves

WAIT = "wait_tensor.default"
UNCOUNTED = ("prim", "profiler")
"""Namespaces of operators that ask for a property of a tensor, or mark a place."""
COLLECTIVES = {
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
}
"""Operators of split modules that send messages, by name, and the names of their collectives."""
Describe = Callable[[Any, Any, Any, Any], Any]
"""Turns an operator, its arguments, its keywords and its output into a description, if its kernel is of a library."""


class Mark(NamedTuple):
    """A moment of a traced step."""

    kind: str
    which: int
    """Index of the unit or parameter; -1: the whole model."""
    level: int
    """Bytes in use at this moment, over those before the step."""
    peak: int
    """Most bytes in use since the mark before."""


class Operator(NamedTuple):
    """One call of an operator."""

    name: str
    """aten.mm.default"""
    mark: int
    """Number of the trace's next mark."""
    flops: int
    moved: int
    """Bytes that are read and written, each tensor once."""
    view: bool
    """Whether it computes nothing: its output is a view."""
    message: int
    """Bytes of its largest tensor: of a collective the whole message, which is summed or gathered."""

    @property
    def collective(self) -> str | None:
        """Returns the name of the collective; None: the operator sends nothing."""
        return COLLECTIVES.get(self.name)


class Ledger(TorchDispatchMode):
    """Mode that follows the storage of each operator's output from its creation to its end.

    Args:
        existing: tensors whose bytes do not count.
        describe: describes the operators whose kernels are of libraries.
        records: whether to keep every operator in `operators`.
    """

    def __init__(
        self, existing: Iterable[Tensor], describe: Describe | None = None, *, records: bool = False
    ) -> None:
        super().__init__()
        self._storages: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._ends: dict[int, weakref.ref] = {}
        self._describe, self._records = describe, records
        self.now = self._peak = 0
        self.marks: list[Mark] = []
        self.calls: list[tuple[int, int, Any]] = []
        """Of each described operator: the number of the next mark, the bytes in use, the description."""
        self.operators: list[Operator] = []
        for tensor in existing:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
            self._storages[local.untyped_storage()] = 0

    def mark(self, kind: str, which: int = -1) -> None:
        """Notes a moment."""
        self.marks.append(Mark(kind, which, self.now, max(self._peak, self.now)))
        self._peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others (DTensor): the operators on those are counted
        keywords = kwargs or {}
        # Without values it would be a new tensor, where it is the one that is waited for.
        output = args[0] if func.__name__ == WAIT else func(*args, **keywords)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self._records and func.namespace not in UNCOUNTED:
            self._record(func, args, keywords, output, made)
        for tensor in made:
            self._follow(tensor)
        self._peak = max(self._peak, self.now)
        call = None if self._describe is None else self._describe(func, args, keywords, output)
        if call is not None:
            self.calls.append((len(self.marks), self.now, call))
        return output

    def _record(self, operator: Any, arguments: Any, keywords: Any, output: Any, made: list[Tensor]) -> None:
        """Keeps a call; before its output is followed, so that a view is told by its storage."""
        read = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        read = [tensor for tensor in read if tensor.layout == torch.strided]
        inputs = {id(tensor.untyped_storage()) for tensor in read}
        old = all(
            id(tensor.untyped_storage()) in inputs or tensor.untyped_storage() in self._storages
            for tensor in made
        )
        sizes = {
            (
                id(tensor.untyped_storage()),
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
            ): math.prod(tensor.shape) * tensor.dtype.itemsize
            for tensor in (*read, *made)
        }
        self.operators.append(
            Operator(
                name=str(operator),
                mark=len(self.marks),
                flops=_flops(operator, arguments, keywords, output),
                moved=sum(sizes.values()),
                view=bool(made) and old and not operator_mutates(operator),
                message=max(sizes.values(), default=0),
            )
        )

    def _follow(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        before = self._storages.get(storage)
        if before is not None and before in (0, size):
            return
        self._storages[storage] = size
        self.now += size - (before or 0)
        key = id(storage)
        ledger = self

        def ended(_: Any, size: int = size) -> None:
            ledger._ends.pop(key, None)
            ledger.now -= size

        self._ends[key] = weakref.ref(storage, ended)


def _flops(operator: Any, arguments: Any, keywords: Any, output: Any) -> int:
    name = operator.overloadpacket
    if str(name).endswith("attention_for_cpu"):  # torch counts GPUs' kernels only
        return sdpa_flop_count(*(tensor.shape for tensor in arguments[:3]))
    if str(name).endswith("attention_for_cpu_backward"):
        return sdpa_backward_flop_count(*(tensor.shape for tensor in arguments[:4]))
    count = flop_registry.get(name)
    return 0 if count is None else int(count(*arguments, **keywords, out_val=output))
