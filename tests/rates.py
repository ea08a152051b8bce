"""The learning rates of a training's steps, by its optimizer and schedule."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def rates(optimizer: Optimizer, schedule: LRScheduler | None, steps: int) -> list[float]:
    """Returns the learning rate of each step."""
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None and step < steps - 1:
            schedule.step()
    return found
