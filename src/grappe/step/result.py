"""StepResult: the result of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from grappe.data.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from grappe.step.reduction import Sums


class StepResult(NamedTuple):
    """The result of one optimizer step; its values may still be being computed."""

    batch: Batch
    sums: Sums
    """The loss's global sum and the processes' flags, still being computed."""
    norm: Tensor | None
    """The whole gradient's norm before clipping, a scalar; None if the step did not need it."""
    skipped: bool
    """Whether an fp16 infinity occurred: nothing was learned, and the schedule did not advance."""
    lr: float
    """The learning rate of the first parameter group in this step."""


After = Callable[[StepResult], bool]
