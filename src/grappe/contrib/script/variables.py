"""Finds the state of a running script: the tensors, numbers and generators that its variables hold, by path.

A path is the same in a script that comes back to the same place: `train: losses[2]`, `model._modules["head"].weight`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from grappe.errors import TaskError
from grappe.errors.user_line import is_users_file
from grappe.private_api.torch import tensor_version

MOST = 200_000
"""Values that are looked at: more are a dataset's in memory."""
CONTAINERS = (dict, list, tuple, deque)
LEFT_OUT = (
    DataLoader, Dataset, Sampler, Optimizer, type, types.ModuleType, types.CodeType, types.FrameType,
    types.GeneratorType, np.ndarray, str, bytes, torch.dtype, torch.device,
)  # fmt: skip
"""Objects that a resumed script makes again, or that are kept in another way."""
FUNCTIONS = (types.FunctionType, types.MethodType)
PLAIN = (nn.Module, LRScheduler, argparse.Namespace, types.SimpleNamespace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variables:
    """State of a script, by path."""

    tensors: dict[str, Tensor]
    numbers: dict[str, bool | int | float]
    generators: dict[str, torch.Generator | np.random.Generator]


class Unchanged:
    """Tensors as they were before the first step: a script that begins again makes them again."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._before = {id(each): (weakref.ref(each), tensor_version(each)) for each in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        reference, version = self._before.get(id(tensor), (lambda: None, 0))
        return reference() is tensor and tensor_version(tensor) == version


def variables_of(optimizers: Sequence[Optimizer]) -> Variables:
    """Returns the state of the script that calls this.

    Raises:
        TaskError: there are too many values.
    """
    state = Variables(tensors={}, numbers={}, generators={})
    waiting = deque((path, value, True) for path, value in _roots(optimizers))
    seen: dict[int, Any] = {}
    while waiting:
        path, value, own = waiting.popleft()
        if isinstance(value, bool | int | float):
            if own:  # of an enum or of NumPy too, which a checkpoint gives back as Python's own
                kind = next(kind for kind in (bool, int, float) if isinstance(value, kind))
                state.numbers[path] = kind(value)
            continue
        if id(value) in seen or value is None or isinstance(value, LEFT_OUT):
            continue
        seen[id(value)] = value
        if len(seen) > MOST:
            raise TaskError(f"its variables hold more than {MOST:,} values ({path})")
        if isinstance(value, Tensor):
            state.tensors[path] = value
        elif isinstance(value, torch.Generator | np.random.Generator):
            state.generators[path] = value
        else:
            waiting.extend((part, each, own and _is_own(value)) for part, each in _parts(path, value))
    return state


def _roots(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    for number, optimizer in enumerate(optimizers):
        yield f"optimizer[{number}]", [group["params"] for group in optimizer.param_groups]
    for name, module in sorted(own_modules().items()):
        yield from ((f"{name}.{key}", value) for key, value in _named(vars(module)))
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if is_users_file(code.co_filename) and code.co_name != "<module>":
            yield from ((f"{code.co_name}: {key}", value) for key, value in _named(frame.f_locals))


def _named(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in list(names.items()) if not key.startswith("__"))


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, CONTAINERS):
        yield from ((f"{path}[{number}]", each) for number, each in enumerate(value))
    elif isinstance(value, FUNCTIONS):
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):  # and none of C
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
            yield from ((f"{path}<{name}>", cell.cell_contents) for name, cell in cells if cell != types.CellType())
        yield f"{path}.__self__", getattr(value, "__self__", None)
    elif hasattr(value, "__dict__"):
        yield from ((f"{path}.{key}", each) for key, each in list(vars(value).items()))


def _is_own(value: Any) -> bool:
    """Returns whether the numbers in a value are the script's: a progress bar's are of its clock."""
    if isinstance(value, (*CONTAINERS, *FUNCTIONS, *PLAIN)):
        return True
    return _is_own_module(type(value).__module__, sys.modules.get(type(value).__module__))


def own_modules() -> dict[str, types.ModuleType]:
    """Returns the script, and the modules of its own that it has imported."""
    return {name: module for name, module in list(sys.modules.items()) if _is_own_module(name, module)}


def _is_own_module(name: str, module: types.ModuleType | None) -> bool:
    return name == "__main__" or is_users_file(getattr(module, "__file__", None) or "<none>")
