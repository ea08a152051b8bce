"""Microbatch: the seconds of a traced microbatch's forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from grappe.foresight.recording import Operator
from grappe.foresight.trace import LOSS, Trace

Seconds = Callable[[Operator], float]
"""The seconds of an operator: of a view its call's, else its kernel's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Operators of a part of a step."""

    kernels: float = 0.0
    """Seconds."""
    operators: float = 0
    """Number of operators, views too; of several passes their mean."""


def part_of(operators: Iterable[Operator], seconds: Seconds) -> Part:
    """Adds up operators."""
    took = [seconds(one) for one in operators]
    return Part(kernels=sum(took), operators=len(took))


def microbatch_parts(trace: Trace, seconds: Seconds) -> tuple[Part, Part]:
    """Adds up the operators of a trace's forward, with the loss, and of its backward."""
    assert trace.recording is not None
    loss = next(number for number, mark in enumerate(trace.marks) if mark.kind == LOSS)
    recorded = trace.recording.operators
    return (
        part_of((one for one in recorded if one.mark <= loss), seconds),
        part_of((one for one in recorded if one.mark > loss), seconds),
    )
