"""Parameters: what training each of a model's parameters takes, from its optimizer's step on fake tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.errors import TaskError
from grappe.foresight.ledger import Ledger
from grappe.foresight.trace import END, ROOT, tensors_of
from grappe.parallel.ties import untied


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Memory that training a parameter takes; of a tied one, once."""

    name: str
    shape: tuple[int, ...]
    item: int
    """Bytes of a number."""
    trained: bool
    unit: int
    """The unit with which it is sharded; ROOT: none."""
    states: tuple[int, ...] = ()
    """Bytes of each tensor of the optimizer's state that has a number for each of the parameter's."""
    whole_states: tuple[int, ...] = ()
    """Bytes of each of its other tensors, a step count say, which are never split."""
    temporary: int = 0
    """Bytes that the optimizer needs while it steps this parameter."""

    @property
    def size(self) -> int:
        """Computes the parameter's bytes."""
        return self.item * math.prod(self.shape)


def sharded_with(model: nn.Module, units: Sequence[nn.Module]) -> dict[int, int]:
    """Returns the unit with which fully_shard has each parameter, by its id; without those that the root has."""
    alone = {id(unit) for unit in untied(model, units)}
    return {one: number for one, number in homes_of(units).items() if id(units[number]) in alone}


def homes_of(units: Sequence[nn.Module]) -> dict[int, int]:
    """Returns the first unit of each parameter, by its id."""
    homes: dict[int, int] = {}
    for number, unit in enumerate(units):
        for one in unit.parameters():
            homes.setdefault(id(one), number)
    return homes


def stepped(
    optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], homes: dict[int, int], foreach: bool
) -> tuple[tuple[Parameter, ...], float]:
    """Steps the optimizer on one parameter after the other, and notes what each takes; then on all together.

    Returns:
        The parameters; and how many times the largest of their temporary bytes a step of all takes: Python keeps the
        last parameter's until the next has made its own, and foreach makes all at once.
    """
    trained = [(name, one) for name, one in named if one.requires_grad]
    for group in optimizer.param_groups:
        if foreach and group.get("foreach", False) is None:
            group["foreach"] = True
    found = []
    for name, one in named:
        split, whole, temporary = [], [], 0
        if one.requires_grad:
            one.grad = torch.empty_like(one)
            optimizer.step()  # makes the state
            ledger = Ledger([one, one.grad, *_state(optimizer, one)])
            with ledger:
                optimizer.step()
            ledger.mark(END)
            for value in _settled(optimizer, one, ledger.now):
                (split if value.shape == one.shape and value.dim() else whole).append(value.nbytes)
            one.grad = None
            temporary = ledger.marks[-1].peak
        found.append(
            Parameter(
                name=name,
                shape=tuple(one.shape),
                item=one.element_size(),
                trained=one.requires_grad,
                unit=homes.get(id(one), ROOT),
                states=tuple(split),
                whole_states=tuple(whole),
                temporary=temporary,
            )
        )
    for _, one in trained:
        one.grad = torch.empty_like(one)
    held = [value for _, one in named for value in (one, one.grad, *_state(optimizer, one))]
    ledger = Ledger([value for value in held if value is not None])
    with ledger:
        optimizer.step()
    ledger.mark(END)
    for _, one in trained:
        one.grad = None
    return tuple(found), ledger.marks[-1].peak / max(1, *(one.temporary for one in found))


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return tensors_of(dict(optimizer.state.get(parameter, {})))


def _settled(optimizer: Optimizer, parameter: nn.Parameter, more: int) -> list[Tensor]:
    """Returns the state after two steps, of which the second has made `more` bytes.

    Raises:
        TaskError: the third makes still more.
    """
    values = _state(optimizer, parameter)
    if more:
        held = sum(one.nbytes for one in values)
        optimizer.step()
        if sum(one.nbytes for one in _state(optimizer, parameter)) > held:
            raise TaskError(
                f"the state of {type(optimizer).__name__} grows from step to step, so what it takes in the end is not "
                "foreseen: grappe measure, with so many --steps, measures it"
            )
    return values
