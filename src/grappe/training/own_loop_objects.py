"""Keeps what a hand-written loop has beyond models and optimizers in its checkpoints: schedules, averages, scalers.

An object is kept by its `state_dict()`: tensors as tensors, all else as JSON.
"""

from __future__ import annotations

import gc
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from grappe.checkpoint.weights import Weights
from grappe.errors import UsageError
from grappe.private_api.torch import schedulers_of
from grappe.training.random_state import set_state_of, state_of

PREFIX = "kept."
TENSOR, PAIRS = "tensor", "pairs"
PLAIN = (bool, int, float, str, type(None))
NAMES = {LRScheduler: "schedule", AveragedModel: "average", torch.amp.GradScaler: "scaler"}
"""Objects that change what is learned and that a loop cannot see: refused unless they are kept, under such a name."""


class KeptObjects:
    """Objects with `state_dict` and `load_state_dict`, by the names that the user gave them."""

    def __init__(self, objects: Mapping[str, Any] | None = None) -> None:
        self._objects: dict[str, Any] = {}
        self.add(objects or {})

    def add(self, objects: Mapping[str, Any]) -> None:
        """Keeps further objects.

        Raises:
            UsageError: an object has no state_dict and load_state_dict, or a name is taken.
        """
        for name, kept in objects.items():
            if isinstance(kept, torch.Generator | np.random.Generator):
                objects = {**objects, name: _with_state_dict(kept)}
            elif not (hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict")):
                kind = type(kept).__name__
                raise UsageError(f"keep({name}=…): a {kind} has no state_dict() and load_state_dict(): give it both")
            if name in self._objects and self._objects[name] is not kept:
                raise UsageError(f"keep({name}=…): another object has this name already")
        self._objects.update(objects)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the objects' tensors, by names that begin with PREFIX, and their other values as JSON.

        Raises:
            UsageError: a state_dict has a value that is neither.
        """
        tensors: dict[str, Tensor] = {}
        values = {name: _packed(kept.state_dict(), f"{PREFIX}{name}", tensors) for name, kept in self._objects.items()}
        return tensors, values

    def restore(self, tensors: Weights, values: Mapping[str, Any]) -> None:
        """Puts the saved values back; a tuple or a Counter stays one.

        Raises:
            UsageError: an object was not saved.
        """
        for name, kept in self._objects.items():
            if name not in values:
                raise UsageError(f"keep({name}=…): the checkpoint has no {name}: it has {', '.join(values) or 'none'}")
            kept.load_state_dict(_unpacked(values[name], kept.state_dict(), tensors))

    def refuse_others(self, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
        """Raises UsageError if a schedule or an average of these, or a loss scaler, is not kept."""
        kept = list(self._objects.values())
        for each in kept:  # and of each the schedules that it is made of, as SequentialLR is
            kept += schedulers_of(each)
        ids, ours, classes = set(map(id, kept)), set(map(id, optimizers)), set(map(type, models))
        gc.collect()  # or what a script or a cell made before would be found
        for item in gc.get_objects():
            kind = next((kind for kind in NAMES if issubclass(type(item), kind)), None)
            if kind is None or id(item) in ids:
                continue
            if kind is LRScheduler and id(getattr(item, "optimizer", None)) not in ours:
                continue
            if kind is AveragedModel and type(item.module) not in classes:
                continue
            raise UsageError(
                f"a resumed loop would begin the {type(item).__name__} again: put it into the checkpoints with "
                f"loop.keep({NAMES[kind]}=…), before the first batch"
            )


def _with_state_dict(generator: torch.Generator | np.random.Generator) -> Any:
    """Returns an object that has a random generator's state as a state_dict."""
    return types.SimpleNamespace(
        state_dict=lambda: {"state": state_of(generator)},
        load_state_dict=lambda state: set_state_of(generator, state["state"].cpu()),
    )


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns `value` as JSON; its tensors go to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {PAIRS: [[key, _packed(each, f"{name}.{key}", tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_packed(each, f"{name}.{number}", tensors) for number, each in enumerate(value)]
    if not isinstance(value, PLAIN):
        raise UsageError(
            f"keep(): {name.removeprefix(PREFIX)} is a {type(value).__name__}, which a checkpoint cannot hold: leave "
            "it out of state_dict(), or make it a number, a text, a tensor, or a list or dictionary of these"
        )
    return value


def _unpacked(saved: Any, now: Any, tensors: Weights) -> Any:
    """Returns what `_packed` has packed. `now`: the value at the same place of the object as it was made."""
    if isinstance(saved, Mapping) and TENSOR in saved:
        value = tensors.read(saved[TENSOR]).clone()
        return value.to(now.device) if isinstance(now, Tensor) else value
    if isinstance(saved, Mapping):
        present = now if isinstance(now, Mapping) else {}
        entries = {key: _unpacked(each, present.get(key), tensors) for key, each in saved[PAIRS]}
        return Counter(entries) if isinstance(now, Counter) else entries
    if isinstance(saved, list):
        before = list(now) if isinstance(now, list | tuple) else []
        before += [None] * (len(saved) - len(before))
        items = [_unpacked(each, old, tensors) for each, old in zip(saved, before, strict=False)]
        return tuple(items) if isinstance(now, tuple) else items
    return saved
