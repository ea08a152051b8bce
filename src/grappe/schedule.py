"""A learning-rate schedule is rebuilt and stepped, never serialised: restored from JSON it goes silently wrong."""

from __future__ import annotations

import warnings

from torch.optim.lr_scheduler import LRScheduler


def replay(schedule: LRScheduler, steps: int) -> None:
    """Brings a new schedule to where it stood after `steps` optimizer steps."""
    with warnings.catch_warnings():
        # torch warns that the optimizer has not stepped yet: it did, before it was saved.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            schedule.step()
