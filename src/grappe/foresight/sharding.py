"""Sharding: what fully_shard (FSDP2) keeps in memory during a microbatch: gathered parameters, gradients, buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from grappe.foresight.ledger import Mark
from grappe.foresight.parameters import Parameter
from grappe.foresight.trace import ROOT


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
class Copies:
    """Memory that a library of communication takes besides the buffers that it is given."""

    takes: bool
    """Whether it has a copy: of what it gathers, while it gathers it; of what it reduces, likewise."""
    lingers: bool = False
    """Whether the copy of what it reduced, and what it gathered, stay while one of its two threads is late: the other
    runs the next call, with a copy of its own."""


NCCL = Copies(takes=False)
GLOO = Copies(takes=True)
GLOO_LATE = Copies(takes=True, lingers=True)


class Sharding:
    """A microbatch under fully_shard: units are gathered before their forward and backward, and freed after them.

    Args:
        zero: the ZeRO stage.
        there: whether an earlier microbatch has left gradients.
        reduces: whether this microbatch's gradients are reduced, or stay whole (zero=1, all but the last).
        copies: what gathering and reducing take besides.
        held: whether parameters stay gathered and gradients whole over several passes, until the mark "reduce": zero=1
            in a pipeline. What is traced has these gradients, and none is marked.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        ways: int,
        zero: int,
        *,
        there: bool,
        reduces: bool,
        copies: Copies,
        held: bool = False,
    ) -> None:
        self._parameters, self._ways, self._zero, self._reduces = parameters, ways, zero, reduces
        self._copies, self._held = copies, held
        self._full: dict[int, int] = {}
        self._trained: dict[int, int] = {}
        self._whole: dict[int, int] = {}  # gradients before they are reduced, by unit
        self._accumulates = there and zero == 1
        for one in parameters:
            if not one.shape:  # scalars stay whole
                continue
            _add(self._full, one.unit, padded(one, ways))
            if one.trained:
                _add(self._trained, one.unit, padded(one, ways))
                if self._accumulates:
                    _add(self._whole, one.unit, one.size)
        self._gathered: dict[int, int] = {}  # whole parameters, by unit
        self._buffers: dict[int, int] = {}  # what all-gathers write, by unit
        self._reducing = 0  # what the last reduce-scatter read
        self._late: list[
            tuple[bool, int]
        ] = []  # what a thread of the library may have yet; is it of the last call?
        self._traced = 0  # of all this, what the trace has in its own bytes
        self._there = there
        self._shards = sum(self._trained.values()) // ways if there and zero != 1 else 0  # reduced gradients
        self._done: set[int] = set()
        self._begun: set[int] = set()
        self._order: list[int] = []  # units, as their forwards ended
        self._places: dict[int, list[int]] = {}  # in that order, by unit: of those whose backward is to come

    @property
    def now(self) -> int:
        """Sums the bytes in use."""
        held = (self._gathered, self._buffers, self._whole)
        return (
            sum(sum(one.values()) for one in held)
            + self._reducing
            + self._shards
            + self._lingering
            - self._traced
        )

    @property
    def _lingering(self) -> int:
        return max((size for _, size in self._late), default=0)

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
                for one in self._parameters:
                    if one.shape and one.trained:
                        _add(self._whole, one.unit, one.size)
                self._traced = sum(self._whole.values())
                self._end()
        return max(self._most, self.now)

    def _end(self) -> None:
        """Ends a backward: reduces what has not been yet, and frees what was gathered ahead in vain."""
        for one in sorted(self._full):  # as torch goes through them: the root first
            self._reduce(one)
        self._reducing = 0
        self._buffers.clear()
        self._done.clear()
        self._begun.clear()
        self._order.clear()
        self._places.clear()
        self._there = True

    def _enter(self, unit: int) -> None:
        """Gathers a unit; what the one before was gathered into is kept until then."""
        if unit not in self._full or unit in self._gathered:
            return
        before = list(self._buffers)
        self._gather(unit)
        freed = sum(self._buffers.pop(one) for one in before)
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
            freed = self._buffers.pop(unit, 0)
            self._linger(freed)
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
            _add(self._whole, parameter.unit, parameter.size)

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
        if not self._there or self._zero == 1:
            self._shards += shard
        if self._ways > 1:
            self._linger(size)

    def _called(self) -> None:
        """Ends a call of the library: a thread can be late with the call before, and with none before that."""
        self._late = [(False, size) for is_last, size in self._late if is_last]

    def _linger(self, size: int) -> None:
        if self._copies.lingers:
            self._late.append((True, size))

    def _note(self, besides: int = 0) -> None:
        self._most = max(self._most, self.now + besides)


def _add(sizes: dict[int, int], unit: int, size: int) -> None:
    sizes[unit] = sizes.get(unit, 0) + size
