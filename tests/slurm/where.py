"""The digits without a score, whose processes say once where they are."""

import os

import torch

from grappe import Task
from grappe.tasks.digits import Digits

NAMES = ("SLURM_PROCID", "SLURMD_NODENAME", "SLURM_CPUS_PER_TASK")
SAID: list[str] = []


class Where(Digits):
    """Digits."""

    epochs: int = 2
    metrics = Task.metrics  # none

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not SAID:
            SAID.append("here:")
            print(*SAID, *(os.environ.get(name, "-") for name in NAMES), flush=True)
        return super().loss(output, target)
