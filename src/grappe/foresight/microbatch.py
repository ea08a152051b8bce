"""Microbatch: the seconds of a traced microbatch's forward and backward, unit by unit."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping

from grappe.foresight.recording import Operator, Recording
from grappe.foresight.trace import BACKWARD, DONE, FORWARD, LEFT, LOSS, ROOT, Trace

Seconds = Callable[[Operator], float]
"""The seconds of an operator: of a view its call's, else its kernel's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Operators of a unit in one direction."""

    kernels: float = 0.0
    """Seconds."""
    operators: int = 0
    """Number of operators, views too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchTime:
    """A microbatch by units; ROOT: what belongs to none."""

    forward: Mapping[int, Part]
    backward: Mapping[int, Part]

    @functools.cached_property
    def whole(self) -> tuple[Part, Part]:
        """Sums forward and backward over all units."""
        return _sum(self.forward), _sum(self.backward)


def microbatch_time(trace: Trace, seconds: Seconds) -> MicrobatchTime:
    """Adds up a trace's operators by unit and direction."""
    assert trace.recording is not None
    loss = next(number for number, mark in enumerate(trace.marks) if mark.kind == LOSS)
    places = _units(trace)
    sums: dict[tuple[bool, int], list[float]] = defaultdict(lambda: [0.0, 0])
    for one in trace.recording.operators:
        entry = sums[one.mark <= loss, places[one.mark]]
        entry[0] += seconds(one)
        entry[1] += 1
    parts = {key: Part(kernels=took, operators=int(count)) for key, (took, count) in sums.items()}
    return MicrobatchTime(
        forward={unit: part for (ahead, unit), part in parts.items() if ahead},
        backward={unit: part for (ahead, unit), part in parts.items() if not ahead},
    )


def recording_seconds(recording: Recording, seconds: Seconds) -> Part:
    """Adds up all operators of a recording."""
    return Part(
        kernels=sum(seconds(one) for one in recording.operators),
        operators=len(recording.operators),
    )


def _units(trace: Trace) -> list[int]:
    """Returns, for each mark, the unit of the operators that come before it."""
    inside, found = [ROOT], []
    for mark in trace.marks:
        found.append(inside[-1])
        if mark.kind == FORWARD:
            inside.append(mark.which)
        elif mark.kind == LEFT and len(inside) > 1:
            inside.pop()
        elif mark.kind == BACKWARD:
            inside = [ROOT, mark.which]
        elif mark.kind == DONE and inside[-1] == mark.which:  # else the unit before has begun already
            inside = [ROOT]
    return [*found, ROOT]


def _sum(parts: Mapping[int, Part]) -> Part:
    return Part(
        kernels=sum(one.kernels for one in parts.values()),
        operators=sum(one.operators for one in parts.values()),
    )
