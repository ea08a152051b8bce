"""Options of grappe measure, for Python and the command line; needs no torch."""

from __future__ import annotations

import dataclasses

from grappe.errors import UsageError
from grappe.fields import Counts, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The extent of a measurement.

    `grappe measure` has an option for each field, with the docstring under the field as its help.
    """

    steps: int = 30
    """Timed steps of each training, after 5 warm-up steps."""
    repeats: int = 3
    """Number of trainings of each plan, by turns."""
    batch_size: Counts = ()
    """Samples per step over all processes: 64, or 32,64,128. Default: the task's own."""
    weak: bool = False
    """Weak scaling: batch sizes are for one data-parallel process and grow with their number."""
    why: bool = False
    """Show where each plan's time goes, and what would move it: a waterfall from what the device can reach."""
    evaluate_every: int | None = None
    """Steps between evaluations, which --why counts. Default: an epoch's."""
    save_every: int | None = None
    """Steps between checkpoints, which --why counts. Default: an epoch's."""

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "repeats", "evaluate_every", "save_every")
        if min(self.batch_size, default=1) < 1:
            raise UsageError(f"--batch-size={min(self.batch_size)}: it must be at least 1")
