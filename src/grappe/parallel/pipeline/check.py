"""Checks that a task's units in sequence compute what its model does: on two samples, or on their shapes alone."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import PlanError, user_code
from grappe.parallel.pipeline.units import pipeline_units
from grappe.private_api.torch import tree_leaves
from grappe.task import Task

TOLERANCE = 1e-4  # relative: the same operations in the same order give the same bits, or nearly


@torch.no_grad()
def check_units(task: Task, example: Any) -> None:
    """Runs the model, then its units in sequence, with the same dropout.

    Raises:
        PlanError: the outputs differ.
    """
    torch.set_num_threads(1)  # in a forked process
    torch.manual_seed(task.seed)
    model = task.model().train()
    units = pipeline_units(task, model)  # which may switch off what the model returns besides
    torch.manual_seed(1)
    wanted = task.forward(model, example)
    torch.manual_seed(1)
    if not _alike(wanted, _sequence(task, units, example)):
        raise _differ(task)


@torch.no_grad()
def check_without_values(task: Task, model: nn.Module, example: Any) -> None:
    """Checks as `check_units`, without values: the outputs' shapes, and the order in which modules are called.

    Raises:
        PlanError: they differ.
    """
    units, runs = pipeline_units(task, model), _Calls()
    with runs.recorded(model):
        wanted = task.forward(model, example)
        found = _sequence(task, units, example, runs.begin_unit)
    if not _alike(wanted, found, lambda *_: True) or not runs.agree:
        raise _differ(task)


class _Calls:
    """Calls of modules with parameters of their own: by the model, and by its units in sequence."""

    def __init__(self) -> None:
        self._by_model: list[nn.Module] = []
        self._by_units = defaultdict[nn.Module, list[int]](list)
        self._unit: int | None = None

    @contextlib.contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Context in which calls are recorded, those of the model itself until `begin_unit`."""
        own = [one for one in model.modules() if next(one.parameters(recurse=False), None) is not None]
        hooks = [one.register_forward_pre_hook(self._called) for one in own]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin_unit(self, number: int) -> None:
        """Notes that the calls that follow are those of this unit."""
        self._unit = number

    @property
    def agree(self) -> bool:
        """Returns whether the units call as often as the model, and in the order in which the model does.

        A module that only one of both calls says nothing: its parameters may be used without a call.
        """
        places, order = {one: list(units) for one, units in self._by_units.items()}, []
        for one in self._by_model:
            if one in places:
                if not places[one]:
                    return False
                order.append(places[one].pop(0))
        called = set(self._by_model)
        return order == sorted(order) and not any(left for one, left in places.items() if one in called)

    def _called(self, module: nn.Module, _: Any) -> None:
        if self._unit is None:
            self._by_model.append(module)
        else:
            self._by_units[module].append(self._unit)


def _sequence(
    task: Task, units: list[nn.Module], value: Any, begin: Callable[[int], None] = lambda number: None
) -> Any:
    try:
        for number, unit in enumerate(units):
            begin(number)
            value = unit(value) if number else task.forward(unit, value)
    except Exception as error:
        raise PlanError(
            f"a pipeline runs {type(task).__name__}.units() one after the other, each on the previous unit's output, "
            f"which fails: {user_code.sentence(error)}. They must be the whole model, in order"
        ) from error
    return value


def _differ(task: Task) -> PlanError:
    return PlanError(
        f"{type(task).__name__}.units(), one after the other, do not compute what the model computes, as a pipeline "
        "needs: put all other work of forward() into a unit"
    )


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * float(a.abs().max() or 1.0))


def _alike(wanted: Any, found: Any, same: Callable[[Tensor, Tensor], bool] = _close) -> bool:
    ours, theirs = tree_leaves(wanted), tree_leaves(found)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return False
        elif a.shape != b.shape or not same(a, b):
            return False
    return True
