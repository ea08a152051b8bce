"""Trains a task of the gallery for a few steps, and leaves out of its weights what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grappe import tasks
from grappe.launch.rank import ProcessRank
from tests.parity import cell


def train(process: ProcessRank, rendezvous_folder: Path, file: str, plan: str, steps: int) -> dict[str, Any]:
    """As tests.parity.cell.train, of the task in `file`."""
    return cell.train(process, rendezvous_folder, tasks.find(file)(), plan, steps)


def seen(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the bias of attention's keys: its gradient is rounding alone, and of that Adam makes whole steps."""
    kept = {key: one.detach().clone() for key, one in weights.items() if "key.bias" not in key}
    for key, one in kept.items():
        if key.endswith("in_proj_bias"):
            one.view(3, -1)[1] = 0  # of queries, keys and values
    return kept
