"""The training loop of engines that let us own it, and what a step gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from grappe.data.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from grappe.prepare.tally import Sums


class StepResult(NamedTuple):
    """What one optimizer step did, with nothing waited for."""

    batch: Batch
    sums: Sums
    """The loss's global sum and the processes' flags, on their way from the device."""
    norm: Tensor | None
    """The whole gradient's norm before clipping, a scalar; None where nobody asked for it."""
    skipped: bool
    """An fp16 infinity: nothing was learned, and the schedule did not advance."""
    lr: float
    """The learning rate of the first parameter group in this step."""


After = Callable[[StepResult], bool]


def loop(step: Callable[[Batch], StepResult], batches: Iterator[Batch], after: After) -> None:
    """Steps through `batches` until they end or `after` says that it is enough."""
    for batch in batches:
        if after(step(batch)):
            return
