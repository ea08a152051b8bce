"""Stage: some units of a model, one after the other, with flat tensors as inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import TaskError
from grappe.private_api.torch import TreeSpec, module_children, tree_flatten, tree_unflatten
from grappe.task import Call


class Stage(nn.Module):
    """Units in sequence. Stages exchange flat tensors; `entering` and `leaving` describe their nesting.

    Args:
        number: its index among `count` stages, from 0.
        precision: the context of its forward.
        call: the task's forward, which gives the first unit the inputs.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        number: int,
        count: int,
        precision: contextlib.AbstractContextManager[Any],
        call: Call,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.number, self.count = number, count
        self._precision, self._call = precision, call
        self.source: Callable[..., Any] | None = None
        """Of a first stage: the inputs that its forward's argument stands for."""
        self.entering: TreeSpec | None = None
        self.leaving: TreeSpec | None = None

    @property
    def is_first(self) -> bool:
        """Returns whether this stage takes the model's inputs."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Returns whether this stage returns the model's output."""
        return self.number == self.count - 1

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Maps flat tensors to flat tensors."""
        if self.source is not None:
            value = self.source(*leaves)
        else:
            assert self.entering is not None
            value = tree_unflatten([_straight(leaf) for leaf in leaves], self.entering)
        with self._precision:
            for number, unit in enumerate(self.units):
                value = self._call(unit, value) if self.is_first and not number else unit(value)
        given, self.leaving = tree_flatten(value)
        if self.is_last:
            return tuple(given)
        for leaf in given:
            if not isinstance(leaf, Tensor):
                raise TaskError(
                    f"unit {type(self.units[-1]).__name__} hands {type(leaf).__name__} on to the next stage of the "
                    "pipeline: only tensors, nested as you like, can be sent"
                )
        return tuple(leaf.contiguous() for leaf in given)


class _Straight(torch.autograd.Function):
    """The identity, with a contiguous gradient: only contiguous tensors can be sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _straight(leaf: Any) -> Any:
    return _Straight.apply(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def prune(model: nn.Module, mine: Sequence[nn.Module], foreign: Sequence[nn.Module]) -> None:
    """Removes the units of other processes from the model, in place; the remaining parameters keep their names."""
    own = {id(module) for unit in mine for module in unit.modules()}
    gone = {id(module) for unit in foreign for module in unit.modules()} - own
    for module in list(model.modules()):
        for name, child in list(module_children(module).items()):
            if id(child) in gone:
                del module_children(module)[name]
