"""Activation checkpointing: keeps only each unit's inputs, and runs the unit's forward again in backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from grappe.data.batch import BatchRows, InModel, SampleIds, inside
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.private_api.torch import BatchNormBase


def checkpoint_activations(units: Sequence[nn.Module]) -> None:
    """Wraps each unit's forward; names and hooks stay the same."""
    for unit in units:
        contexts = functools.partial(_contexts, unit)
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, context_fn=contexts)


def switch_off_caches(model: nn.Module) -> None:
    """Switches off a transformers model's cache of keys and values: a repeated forward would find its own entries."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # pyrefly: ignore


def _contexts(unit: nn.Module) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    return contextlib.nullcontext(), _EnteredAgain(functools.partial(_as_before, unit, InModel.samples, InModel.place))


class _EnteredAgain(contextlib.AbstractContextManager):
    """Context that is made at each entry: with derivatives in a forward, backward repeats a unit several times."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextlib.contextmanager
def _as_before(unit: nn.Module, samples: SampleIds | None, rows: BatchRows | None) -> Iterator[None]:
    """Context of the second forward, in which a pipeline may have another microbatch in the model."""
    with _statistics_kept(unit), inside(samples), whole_batch_draws(rows):
        yield


@contextlib.contextmanager
def _statistics_kept(unit: nn.Module) -> Iterator[None]:
    """Context of the second forward, which must not update the running statistics again."""
    kept = [
        (module, module.momentum, module.num_batches_tracked, module.num_batches_tracked.clone())
        for module in unit.modules()
        if isinstance(module, BatchNormBase) and module.num_batches_tracked is not None
    ]
    for module, *_ in kept:
        # Not track_running_stats=False: backward would find fewer tensors than forward saved.
        module.momentum = 0.0
    try:
        yield
    finally:
        for module, momentum, batches, before in kept:
            module.momentum = momentum
            batches.copy_(before)
