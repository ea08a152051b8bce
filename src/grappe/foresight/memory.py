"""Memory of one process of a plan: its parameters and states to the byte, and what it takes during a trace."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.errors import TaskError
from grappe.foresight.trace import END, GRADIENT, ROOT, Ledger, Mark, tensors_of
from grappe.parallel.materialise import untied


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
    """Returns the unit in which fully_shard has each parameter, by its id; without the root's parameters."""
    alone = {id(unit) for unit in untied(model, units)}
    return {parameter: number for parameter, number in homes_of(units).items() if id(units[number]) in alone}


def homes_of(units: Sequence[nn.Module]) -> dict[int, int]:
    """Returns the first unit of each parameter, by its id."""
    homes: dict[int, int] = {}
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            homes.setdefault(id(parameter), number)
    return homes


def stepped(
    optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], homes: dict[int, int], foreach: bool
) -> tuple[tuple[Parameter, ...], float]:
    """Steps the optimizer on one parameter after the other, and notes what each takes; then on all together.

    Returns:
        The parameters; and how many times the largest of their temporary bytes a step of all takes: Python keeps the
        last parameter's until the next has made its own, and foreach makes all at once.
    """
    parameters = []
    for name, parameter in named:
        split, unsplit, temporary = [], [], 0
        if parameter.requires_grad:
            ledger = second_step(optimizer, [parameter], foreach=foreach)
            for value in _settled(optimizer, parameter, ledger.now):
                (split if value.shape == parameter.shape and value.dim() else unsplit).append(value.nbytes)
            parameter.grad = None
            temporary = ledger.marks[-1].peak
        parameters.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                item=parameter.element_size(),
                trained=parameter.requires_grad,
                unit=homes.get(id(parameter), ROOT),
                states=tuple(split),
                whole_states=tuple(unsplit),
                temporary=temporary,
            )
        )
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    ledger = second_step(optimizer, trained, foreach=foreach)
    for parameter in trained:
        parameter.grad = None
    largest = max(1, *(parameter.temporary for parameter in parameters))
    return tuple(parameters), ledger.marks[-1].peak / largest


def second_step(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    clip: Callable[[], object] | None = None,
    foreach: bool,
    records: bool = False,
) -> Ledger:
    """Steps an optimizer twice with empty gradients of some parameters; follows the second step, with its clipping."""
    for group in optimizer.param_groups:
        if foreach and group.get("foreach", False) is None:
            group["foreach"] = True
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # makes the state
    pairs = [(parameter.grad, _state(optimizer, parameter)) for parameter in parameters]
    held = [value for gradient, state in pairs for value in (gradient, *state) if value is not None]
    ledger = Ledger([*parameters, *held], records=records)
    with ledger:
        if clip is not None:
            with torch.no_grad():
                clip()
        optimizer.step()
    ledger.mark(END)
    return ledger


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return tensors_of(dict(optimizer.state.get(parameter, {})))


def _settled(optimizer: Optimizer, parameter: nn.Parameter, more: int) -> list[Tensor]:
    """Returns the state after two steps; `more` is the bytes that the second step has added.

    Raises:
        TaskError: the third step adds bytes, too.
    """
    values = _state(optimizer, parameter)
    if more:
        held = sum(value.nbytes for value in values)
        optimizer.step()
        if sum(value.nbytes for value in _state(optimizer, parameter)) > held:
            raise TaskError(
                f"the state of {type(optimizer).__name__} grows from step to step, so what it takes in the end is not "
                "foreseen: grappe measure, with so many --steps, measures it"
            )
    return values


class PlanMemory(Protocol):
    """Memory that a plan takes during a microbatch, beyond what the plain model takes."""

    @property
    def now(self) -> int:
        """Returns the bytes in use at this moment."""

    def at(self, mark: Mark) -> int:
        """Goes on to `mark`; returns the most bytes that it took for a moment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """A process's part of a parameter."""

    parameter: Parameter
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Computes the bytes of the part."""
        return math.prod(self.shape) * self.parameter.item

    @property
    def state(self) -> int:
        """Computes the bytes of the optimizer's state."""
        split = sum(self.parameter.states) * self.size // max(1, self.parameter.size)
        return split + sum(self.parameter.whole_states)

    @property
    def temporary(self) -> int:
        """Computes the bytes that the optimizer's step takes for a moment."""
        return self.parameter.temporary * self.size // max(1, self.parameter.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class States:
    """Bytes that a process keeps between its steps' parts."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Sums all of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def states(parts: Sequence[ParameterShard], buffers: int) -> States:
    """Sums the states of a process's parts."""
    return States(
        parameters=sum(part.size for part in parts),
        gradients=sum(part.size for part in parts if part.parameter.trained),
        optimizer=sum(part.state for part in parts),
        buffers=buffers,
    )


class DdpMemory:
    """Gradients of a single process: each stays from when it is computed; later microbatches add to it.

    Args:
        sizes: bytes of each parameter's gradient.
        there: whether an earlier microbatch has left gradients.
        buckets: bytes of DistributedDataParallel's buckets, which the last microbatch's gradients become views of.
        last: whether this is the last microbatch.
    """

    def __init__(self, sizes: Sequence[int], *, there: bool, buckets: int = 0, last: bool = True) -> None:
        self._sizes, self._there, self._into_buckets = sizes, there, bool(buckets) and last
        self.now = buckets + (sum(sizes) if there else 0)

    def at(self, mark: Mark) -> int:
        if mark.kind == GRADIENT and self._there == self._into_buckets:
            self.now += -self._sizes[mark.which] if self._there else self._sizes[mark.which]
        return self.now


def peak(marks: Sequence[Mark], overlay: PlanMemory) -> int:
    """Computes the most bytes of a traced microbatch, or of a part of it."""
    most = 0
    for mark in marks:  # each takes its peak before the overlay goes on
        most = max(most, mark.peak + overlay.now, mark.level + overlay.at(mark), mark.level + overlay.now)
    return most


def rows_of(parameter: Parameter, ways: int, rank: int) -> int:
    """Returns the rows of a process's part: rows are split as by torch.chunk, so that the last may have none."""
    count = parameter.shape[0]
    each = -(-count // ways)
    return max(0, min(each, count - rank * each))


def padded(parameter: Parameter, ways: int) -> int:
    """Computes the bytes of a whole parameter whose parts are made equal."""
    if not parameter.shape:
        return parameter.size
    count = parameter.shape[0]
    return parameter.size // max(1, count) * (-(-count // ways) * ways)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationBuffers:
    """Memory that a library of communication takes beyond the buffers that it is given."""

    takes: bool
    """Whether it has a copy: of what it gathers, while it gathers it; of what it reduces, likewise."""
    lingers: bool = False
    """Whether the copy of what it reduced, and what it gathered, stay while one of its two threads is late: the other
    runs the next call, with a copy of its own. Of split layers' messages too."""


NCCL = CommunicationBuffers(takes=False)
GLOO = CommunicationBuffers(takes=True)
GLOO_LATE = CommunicationBuffers(takes=True, lingers=True)


class FsdpMemory:
    """A microbatch under fully_shard: units are gathered before their forward and backward, and freed after them.

    Args:
        zero: the ZeRO stage.
        there: whether an earlier microbatch has left gradients.
        reduces: whether this microbatch's gradients are reduced, or stay whole (zero=1, all but the last).
        copies: what gathering and reducing take in addition.
        held: whether parameters stay gathered and gradients whole over several passes, until the mark "reduce": zero=1
            in a pipeline. What is traced has these gradients, and none is marked.
        away: whether reduced gradients go to the host.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        ways: int,
        zero: int,
        *,
        there: bool,
        reduces: bool,
        copies: CommunicationBuffers,
        held: bool = False,
        away: bool = False,
    ) -> None:
        self._away = away
        self._parameters, self._ways, self._zero, self._reduces = parameters, ways, zero, reduces
        self._copies, self._held = copies, held
        self._full = Counter[int]()
        self._trained = Counter[int]()
        self._whole = Counter[int]()  # gradients before they are reduced, by unit
        self._accumulates = there and zero == 1
        for parameter in parameters:
            if not parameter.shape:  # scalars stay whole
                continue
            self._full[parameter.unit] += padded(parameter, ways)
            if parameter.trained:
                self._trained[parameter.unit] += padded(parameter, ways)
                if self._accumulates:
                    self._whole[parameter.unit] += parameter.size
        self._gathered: dict[int, int] = {}  # whole parameters, by unit
        self._buffers: dict[int, int] = {}  # what all-gathers write, by unit
        self._reducing = 0  # what the last reduce-scatter read
        # Buffers that a thread of the library may still hold; whether they are the last call's.
        self._late: list[tuple[bool, int]] = []
        self._traced = 0  # the bytes of all this that the trace has counted already
        self._there = there
        self._shards = (
            sum(self._trained.values()) // ways if there and zero != 1 and not away else 0
        )  # reduced gradients
        self._done: set[int] = set()
        self._begun: set[int] = set()
        self._order: list[int] = []  # units, as their forwards ended
        self._places: dict[int, list[int]] = {}  # in that order, by unit: of those whose backward is to come

    @property
    def now(self) -> int:
        """Sums the bytes in use."""
        held = (self._gathered, self._buffers, self._whole)
        return (
            sum(sum(sizes.values()) for sizes in held)
            + self._reducing
            + self._shards
            + max((size for _, size in self._late), default=0)
            - self._traced
        )

    def at(self, mark: Mark) -> int:
        self._most = self.now
        unit = mark.which
        match mark.kind:
            case "start":
                self._enter(ROOT)
            case "forward":
                self._enter(unit)
            case "left":
                self._leave(unit)
            case "loss":
                self._enter_backward(ROOT)
            case "backward":
                self._enter_backward(unit)
            case "gradient":
                self._add(self._parameters[unit])
            case "done" if not self._held:
                self._reduce(unit)
            case "end" if not self._held:
                self._end()
            case "reduce" if self._held:
                self._held = False
                for parameter in self._parameters:
                    if parameter.trained:
                        self._add(parameter)
                self._traced = sum(self._whole.values())
                self._end()
        return max(self._most, self.now)

    def _end(self) -> None:
        """Ends a backward: reduces the remaining gradients, frees units that were gathered ahead in vain."""
        for unit in sorted(self._full):  # in torch's order: the root first
            self._reduce(unit)
        self._reducing = 0
        self._buffers.clear()
        self._done.clear()
        self._begun.clear()
        self._order.clear()
        self._places.clear()
        self._there = True

    def _enter(self, unit: int) -> None:
        """Gathers a unit; the buffer of the unit before it is kept until then."""
        if unit not in self._full or unit in self._gathered:
            return
        before = list(self._buffers)
        self._gather(unit)
        freed = sum(self._buffers.pop(number) for number in before)
        self._copy_out(unit)
        self._linger(freed)

    def _leave(self, unit: int) -> None:
        if unit in self._full:
            self._places.setdefault(unit, []).append(len(self._order))
            self._order.append(unit)
        if unit == ROOT:
            self._buffers.clear()
        if self._zero == 3:
            self._gathered.pop(unit, None)

    def _enter_backward(self, unit: int) -> None:
        """Gathers a unit, and ahead the one whose forward was before it."""
        if unit in self._begun or unit not in self._full:
            return
        self._begun.add(unit)
        if unit not in self._gathered:
            if unit not in self._buffers:
                self._gather(unit)
            self._copy_out(unit)
            self._linger(self._buffers.pop(unit, 0))
        place = self._places[unit].pop() if self._places.get(unit) else 0
        if place and self._order[place - 1] not in self._gathered:
            self._gather(self._order[place - 1])

    def _gather(self, unit: int) -> None:
        """Gathers a unit's parameters into one buffer."""
        if self._ways == 1 or unit in self._buffers:  # they are copied; or gathered ahead
            return
        self._buffers[unit] = self._full[unit]
        self._note(self._full[unit] if self._copies.takes else 0)
        self._called()

    def _copy_out(self, unit: int) -> None:
        """Copies what was gathered into the parameters."""
        self._gathered[unit] = self._full[unit]
        self._note()

    def _add(self, parameter: Parameter) -> None:
        if parameter.shape and not self._accumulates:
            self._whole[parameter.unit] += parameter.size

    def _reduce(self, unit: int) -> None:
        """Frees a unit's parameters, and reduces its gradients."""
        if unit in self._done or unit not in self._full:
            return
        self._gathered.pop(unit, None)
        self._begun.discard(unit)
        if unit not in self._whole:  # its backward comes again: it was called twice
            return
        self._done.add(unit)
        if not self._reduces:
            return
        size = self._trained[unit]
        self._reducing = size
        self._note()
        self._whole.pop(unit, None)
        shard = size // self._ways
        # A single process divides what it would reduce, which is a copy, too.
        self._note(shard + (size if self._copies.takes or self._ways == 1 else 0))
        self._called()
        if (not self._there or self._zero == 1) and not self._away:
            self._shards += shard
        if self._ways > 1:
            self._linger(size)

    def _called(self) -> None:
        """Ends a call of the library: a thread can be late with the call before, and with none before that."""
        self._late = [(False, size) for is_last, size in self._late if is_last]

    def _linger(self, size: int) -> None:
        if self._copies.lingers:
            self._late.append((True, size))

    def _note(self, beyond: int = 0) -> None:
        self._most = max(self._most, self.now + beyond)
