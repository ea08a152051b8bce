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
    """Whether the copy of what it reduced, and what it gathered, stay until its next call: its threads may be late."""


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
    ) -> None:
        self._parameters, self._ways, self._zero, self._reduces = parameters, ways, zero, reduces
        self._copies = copies
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
        self._late = 0  # what threads of the library may have yet
        self._there = there
        self._shards = sum(self._trained.values()) // ways if there and zero != 1 else 0  # reduced gradients
        self._done: set[int] = set()
        self._begun: set[int] = set()

    @property
    def now(self) -> int:
        """Sums the bytes in use."""
        held = (self._gathered, self._buffers, self._whole)
        return sum(sum(one.values()) for one in held) + self._reducing + self._shards + self._late

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
            case "done":
                self._reduce(unit)
            case "end":
                for one in sorted(self._full):  # as torch goes through them: the root first
                    self._reduce(one)
                self._reducing = 0
                self._buffers.clear()
        return max(self._most, self.now)

    def _enter(self, unit: int) -> None:
        """Gathers a unit; what the one before was gathered into is kept until then."""
        if unit not in self._full or unit in self._gathered:
            return
        before = list(self._buffers)
        self._gather(unit)
        freed = sum(self._buffers.pop(one) for one in before)
        self._copy_out(unit)
        self._late = freed if self._copies.lingers else 0

    def _leave(self, unit: int) -> None:
        if unit == ROOT:
            self._buffers.clear()
        if self._zero == 3:
            self._gathered.pop(unit, None)

    def _enter_backward(self, unit: int) -> None:
        """Gathers a unit, and the one whose backward is next, ahead."""
        if unit in self._begun or unit not in self._full:
            return
        self._begun.add(unit)
        if unit not in self._gathered:
            if unit not in self._buffers:
                self._gather(unit)
            self._copy_out(unit)
            freed = self._buffers.pop(unit, 0)
            self._late = freed if self._copies.lingers else 0
        units = sorted(one for one in self._full if one != ROOT)
        ahead = units[-1:] if unit == ROOT else [one for one in units if one < unit][-1:]
        for one in ahead:
            if one not in self._gathered and one not in self._done:
                self._gather(one)

    def _gather(self, unit: int) -> None:
        """Gathers a unit's parameters into one buffer."""
        if self._ways == 1:  # they are copied
            return
        self._buffers[unit] = self._full[unit]
        self._note(self._full[unit] if self._copies.takes else 0)
        self._late = 0

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
        self._done.add(unit)
        self._gathered.pop(unit, None)
        if not self._reduces or unit not in self._trained:
            return
        size = self._trained[unit]
        self._reducing = size
        self._note()
        self._whole.pop(unit, None)
        shard = size // self._ways
        # A single process divides what it would reduce, which is a copy, too.
        self._note(shard + (size if self._copies.takes or self._ways == 1 else 0))
        self._late = 0
        if not self._there or self._zero == 1:
            self._shards += shard
        self._late = size if self._copies.lingers and self._ways > 1 else 0

    def _note(self, besides: int = 0) -> None:
        self._most = max(self._most, self.now + besides)


def _add(sizes: dict[int, int], unit: int, size: int) -> None:
    sizes[unit] = sizes.get(unit, 0) + size
