"""Replaces what a script's training step goes through: its loaders, its backwards, the making of its optimizers."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grappe.private_api.torch import tree_map

T = TypeVar("T")
Begin = Callable[[], Iterator[Any]]
"""Begins an iteration of a loader, which draws random numbers."""
PLANS_FORWARD = weakref.WeakSet[nn.Module]()
"""Modules whose `forward` is a plan's: a copy of one, or one that is saved, has its class's."""


class StepHandler:
    """A script's steps as they are; a handler overrides what it changes of what the script goes through."""

    inner: StepHandler | None = None
    """Handles what this one does not override; None: nothing does."""

    def begun(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Begins an iteration of a loader."""
        return begin() if self.inner is None else self.inner.begun(loader, begin)

    def batches(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Returns what the script gets for each batch of a loader."""
        return begin() if self.inner is None else self.inner.batches(loader, begin)

    def backward(self, loss: Tensor, run: Callable[[float], None]) -> None:
        """Runs a backward, whose loss is multiplied with what `run` is given."""
        run(1.0) if self.inner is None else self.inner.backward(loss, run)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer that the script has made."""
        if self.inner is not None:
            self.inner.add_optimizer(optimizer)


class MainThread:
    """The main thread of a script's process: others, and what it forks, take no part in messages."""

    def __init__(self) -> None:
        self._ids = self._now()

    def __bool__(self) -> bool:
        return self._ids == self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        return os.getpid(), threading.get_ident()


@contextlib.contextmanager
def replaced(*functions: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Context in which attributes of modules and classes are what is made of them: (owner, name, made)."""
    with contextlib.ExitStack() as undo:
        for owner, name, made in functions:
            # As the owner has it: getattr would bind a classmethod to it, for its subclasses, too.
            before = vars(owner).get(name) or getattr(owner, name)
            undo.callback(setattr, owner, name, before)
            setattr(owner, name, made(before))
        yield


@contextlib.contextmanager
def intercepted(handler: StepHandler) -> Iterator[None]:
    """Context in which the script's steps go through `handler`."""
    with replaced(
        (DataLoader, "__iter__", lambda plain: lambda self: _iteration(self, plain, handler)),
        (torch.autograd, "backward", lambda plain: _backward(plain, handler)),
        (Optimizer, "__init__", lambda plain: _adding(plain, handler)),
        (nn.Module, "__getstate__", _without_plans_forward),
    ):
        yield


def _iteration(loader: DataLoader[Any], plain: Callable[[Any], Iterator[Any]], handler: StepHandler) -> Iterator[Any]:
    return handler.batches(loader, functools.partial(handler.begun, loader, functools.partial(plain, loader)))


def _backward(plain: Callable[..., None], handler: StepHandler) -> Callable[..., None]:
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **options: Any) -> None:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        single = isinstance(grad_tensors, Tensor) or grad_tensors is None
        factors = (grad_tensors,) if single else tuple(grad_tensors)
        if grad_tensors is None:
            factors *= len(roots)

        def run(factor: float) -> None:
            if factor == 1.0:
                plain(tensors, grad_tensors, *arguments, **options)
                return
            scaled = [
                torch.full_like(root, factor) if own is None else own * factor
                for root, own in zip(roots, factors, strict=True)
            ]
            plain(roots, scaled, *arguments, **options)

        handler.backward(roots[0], run)

    return backward


def _adding(plain: Callable[..., None], handler: StepHandler) -> Callable[..., None]:
    def made(self: Optimizer, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        handler.add_optimizer(self)

    return made


def _without_plans_forward(plain: Callable[[nn.Module], dict[str, Any]]) -> Callable[[nn.Module], dict[str, Any]]:
    def state(self: nn.Module) -> dict[str, Any]:
        values = plain(self)
        return {key: value for key, value in values.items() if key != "forward"} if self in PLANS_FORWARD else values

    return state


# ---- Batches and modules -----------------------------------------------------------------------------------


def rows_of(batch: Any) -> int | None:
    """Returns how many rows all tensors and lists of a batch have; None if they differ, or it holds anything else."""
    lengths = set(_lengths(batch))
    return lengths.pop() if len(lengths) == 1 and None not in lengths else None


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Tensor):
        yield len(batch) if batch.dim() else None
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif isinstance(batch, list | tuple) and any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch):
        for value in batch:
            yield from _lengths(value)
    elif isinstance(batch, list | tuple):
        yield len(batch)  # a text for each sample
    else:
        yield None


def copied(value: Any) -> Any:
    """Returns a copy of a batch's or an output's tensors, in the same nesting."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Returns the parameters of optimizers that are trained, each once."""
    every = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    return [each for each in {id(each): each for each in every}.values() if each.requires_grad]


def alive(kind: type[T]) -> list[T]:
    """Returns all objects of a class, such as a script's modules, which are in no place that is known.

    It asks their types, as some objects warn when they are asked for their class.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
