"""Sharding: what fully_shard (FSDP2) keeps in memory during a microbatch: gathered parameters, gradients, buffers."""

from __future__ import annotations

from collections.abc import Sequence

from grappe.foresight.ledger import Mark
from grappe.foresight.sketch import Parameter
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


class Sharding:
    """A microbatch under fully_shard: units are gathered before their forward and backward, and freed after them.

    Args:
        zero: the ZeRO stage.
        there: whether an earlier microbatch has left gradients.
        reduces: whether this microbatch's gradients are reduced, or stay whole (zero=1, all but the last).
        copies: how often the gradients of a unit are held while they are reduced: gloo has a copy of its own.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        ways: int,
        zero: int,
        *,
        there: bool,
        reduces: bool,
        copies: int,
    ) -> None:
        self._copies = copies
        self._parameters, self._ways, self._zero, self._reduces = parameters, ways, zero, reduces
        self._full: dict[int, int] = {}
        self._trained: dict[int, int] = {}
        for one in parameters:
            if not one.shape:  # scalars stay whole
                continue
            self._full[one.unit] = self._full.get(one.unit, 0) + padded(one, ways)
            if one.trained:
                self._trained[one.unit] = self._trained.get(one.unit, 0) + padded(one, ways)
        self._gathered: dict[int, int] = {}  # whole parameters, by unit
        self._buffers: dict[int, int] = {}  # what all-gathers write, by unit
        self._whole: dict[int, int] = {}  # gradients before they are reduced, by unit
        self._reducing = 0  # what the last reduce-scatter read
        self._shards = 0  # reduced gradients
        self._there = there
        self._done: set[int] = set()
        self._begun: set[int] = set()
        if there and zero == 1:
            self._whole = dict(self._trained)
        elif there:
            self._shards = sum(self._trained.values()) // ways

    @property
    def now(self) -> int:
        """Sums the bytes in use."""
        held = (self._gathered, self._buffers, self._whole)
        return sum(sum(one.values()) for one in held) + self._reducing + self._shards

    def at(self, mark: Mark) -> int:
        self._most = self.now
        unit = mark.which
        match mark.kind:
            case "start":
                self._enter(ROOT)
            case "forward":
                self._enter(unit)
            case "left" if self._zero == 3:
                self._gathered.pop(unit, None)
            case "loss":
                self._turn()
            case "backward":
                self._enter_backward(unit)
            case "gradient":
                self._add(self._parameters[unit])
            case "done":
                self._reduce(unit)
            case "end":
                for one in sorted(self._full, reverse=True):
                    self._reduce(one)
                self._reducing = 0
                self._buffers.clear()
        return max(self._most, self.now)

    def _enter(self, unit: int) -> None:
        """Gathers a unit; what the one before was gathered into is kept until then."""
        if unit not in self._full or unit in self._gathered:
            return
        before = dict(self._buffers)
        self._buffers[unit] = self._full[unit]
        self._note()
        for one in before:
            self._buffers.pop(one, None)
        self._gathered[unit] = self._full[unit]
        self._note()

    def _turn(self) -> None:
        """Ends the forward and begins the backward of the root, which gathers the last unit ahead."""
        self._buffers.clear()
        if self._zero == 3:
            self._gathered.pop(ROOT, None)
        self._enter_backward(ROOT)

    def _enter_backward(self, unit: int) -> None:
        if unit in self._begun:
            return
        self._begun.add(unit)
        if unit in self._full and unit not in self._gathered:
            self._buffers[unit] = self._full[unit]
            self._gathered[unit] = self._full[unit]
            self._note()
            del self._buffers[unit]
        units = sorted(one for one in self._full if one != ROOT)
        ahead = units[-1:] if unit == ROOT else [one for one in units if one < unit][-1:]
        for one in ahead:
            if one not in self._gathered and one not in self._done:
                self._buffers[one] = self._full[one]
        self._note()

    def _add(self, parameter: Parameter) -> None:
        if parameter.shape and not (self._there and self._zero == 1):
            self._whole[parameter.unit] = self._whole.get(parameter.unit, 0) + parameter.size

    def _reduce(self, unit: int) -> None:
        """Frees a unit's parameters, and reduces its gradients."""
        if unit in self._done or unit not in self._full:
            return
        self._done.add(unit)
        self._gathered.pop(unit, None)
        if not self._reduces or unit not in self._trained:
            return
        self._reducing = self._trained[unit]
        self._note()
        self._whole.pop(unit, None)
        shard = self._trained[unit] // self._ways
        self._reducing *= self._copies
        if not self._there or self._zero == 1:
            self._shards += shard
            self._note()
        else:
            self._most = max(self._most, self.now + shard)

    def _note(self) -> None:
        self._most = max(self._most, self.now)
