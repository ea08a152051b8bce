"""grappe without its chronometer: what that takes of a step is the difference between the two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.contenders import grappe
from benchmarks.pacer import Pacer, Seat
from grappe.chronometer import Chronometer
from grappe.data.batch import Batch
from grappe.task import Task
from grappe.training import Training
from grappe.verbs import worker

SECONDS = 3e-4  # what each step is said to have taken


class Untimed(Chronometer):
    """Looks at no clock and hooks into nothing."""

    def switch(self, phase: int, *_: Any) -> None:
        return

    tell = switch

    def lap(self, *_: Any) -> float:
        return SECONDS

    def watch(self, task: Task, *_: Any) -> Task:
        return task


def run(seat: Seat, pacer: Pacer) -> None:
    """Steps for ever; the pacer ends it."""

    def untimed(self: Training, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    worker.Chronometer = Untimed  # type: ignore[misc]
    Training._timed = untimed  # type: ignore[method-assign]
    grappe.run(seat, pacer)
