"""Memory of one process of a plan: states to the byte, and the peak of a step, composed from a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from grappe.foresight.ledger import Mark
from grappe.foresight.parameters import Parameter
from grappe.foresight.trace import GRADIENT


class Overlay(Protocol):
    """Memory that a plan takes during a microbatch, beside what the plain model takes."""

    @property
    def now(self) -> int:
        """Returns the bytes in use at this moment."""

    def at(self, mark: Mark) -> int:
        """Goes on to `mark`; returns the most bytes that it took for a moment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A process's part of a parameter."""

    parameter: Parameter
    numbers: int
    """Number of the parameter's elements that the process has."""

    @property
    def size(self) -> int:
        """Computes the bytes of the part."""
        return self.numbers * self.parameter.item

    @property
    def state(self) -> int:
        """Computes the bytes of the optimizer's state."""
        whole = max(1, self.parameter.size // self.parameter.item)
        return sum(self.parameter.states) * self.numbers // whole + sum(self.parameter.whole_states)

    @property
    def temporary(self) -> int:
        """Computes the bytes that the optimizer's step takes for a moment."""
        whole = max(1, self.parameter.size // self.parameter.item)
        return self.parameter.temporary * self.numbers // whole


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most bytes that torch allocates on a process's device; None: not known."""

    step: int | None
    evaluation: int | None


UNKNOWN = Peaks(step=None, evaluation=None)


def states(parts: Sequence[Part], buffers: int) -> States:
    """Sums the states of a process's parts."""
    return States(
        parameters=sum(part.size for part in parts),
        gradients=sum(part.size for part in parts if part.parameter.trained),
        optimizer=sum(part.state for part in parts),
        buffers=buffers,
    )


class Accumulating:
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


def peak(marks: Sequence[Mark], overlay: Overlay) -> int:
    """Computes the most bytes of a traced microbatch, or of a part of it."""
    most = 0
    for mark in marks:
        most = max(most, mark.peak + overlay.now)
        most = max(most, mark.level + overlay.at(mark), mark.level + overlay.now)
    return most
