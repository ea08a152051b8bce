"""Ledger: counts the bytes of tensors while operators run on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from grappe.foresight.recording import Recorder, Recording
from grappe.private_api.torch import TorchDispatchMode, tree_leaves

WAIT = "wait_tensor.default"
Describe = Callable[[Any, Any, Any, Any], Any]
"""An operator, its arguments, its keywords and its output to a description, if its kernel is of a library."""


class Mark(NamedTuple):
    """A moment of a traced step."""

    kind: str
    which: int
    """Index of the unit or parameter; -1: the whole model."""
    level: int
    """Bytes in use at this moment, over those before the step."""
    peak: int
    """Most bytes in use since the mark before."""


class Ledger(TorchDispatchMode):
    """Mode that follows the storage of each operator's output from its making to its end.

    Args:
        known: tensors whose bytes do not count.
        describe: describes the operators whose kernels are of libraries.
        recorder: records every operator.
    """

    def __init__(
        self, known: Iterable[Tensor], describe: Describe | None = None, recorder: Recorder | None = None
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._storages: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._ends: dict[int, weakref.ref] = {}
        self._describe = describe
        self.now = self._peak = 0
        self.marks: list[Mark] = []
        self.calls: list[tuple[int, int, Any]] = []
        """Of each described operator: the number of the next mark, the bytes in use, the description."""
        for tensor in known:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
            self._storages[own.untyped_storage()] = 0

    def mark(self, kind: str, which: int = -1) -> None:
        """Notes a moment."""
        self.marks.append(Mark(kind, which, self.now, max(self._peak, self.now)))
        self._peak = self.now

    def recording(self) -> Recording | None:
        """Returns the operators that were recorded; None without a recorder."""
        return None if self._recorder is None else self._recorder.recording()

    def gradient(self, tensor: Tensor) -> None:
        """Notes a parameter's gradient."""
        if self._recorder is not None and not hasattr(tensor, "to_local"):
            self._recorder.gradient(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return (
                NotImplemented  # of a tensor made of others, DTensor say, the operators on those are counted
            )
        keywords = kwargs or {}
        # Without values it would be a new tensor, where it is the one that is waited for.
        output = args[0] if func.__name__ == WAIT else func(*args, **keywords)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        self._peak = max(self._peak, self.now)
        call = None if self._describe is None else self._describe(func, args, keywords, output)
        if call is not None:
            self.calls.append((len(self.marks), self.now, call))
        if self._recorder is not None:
            self._recorder.add(func, args, keywords, output, len(self.marks))
        return output

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
        storages = self

        def ended(_: Any, size: int = size) -> None:
            storages._ends.pop(key, None)
            storages.now -= size

        self._ends[key] = weakref.ref(storage, ended)
