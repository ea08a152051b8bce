"""StepResult: what a step gives back, and the training loop of engines that leave it to grappe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from grappe.data.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from grappe.step.reduction import Sums


class StepResult(NamedTuple):
    """What one optimizer step did, with nothing waited for."""

    batch: Batch
    sums: Sums
    """The loss's global sum and the processes' flags, being computed."""
    norm: Tensor | None
    """The whole gradient's norm before clipping, a scalar; None where the step did not need it."""
    skipped: bool
    """An fp16 infinity: nothing was learned, and the schedule did not advance."""
    lr: float
    """The learning rate of the first parameter group in this step."""


After = Callable[[StepResult], bool]


def loop(step: Callable[[Batch], StepResult], batches: Iterator[Batch], after: After) -> None:
    """Steps through `batches` until they end or `after` returns True."""
    for batch in batches:
        if after(step(batch)):
            return
